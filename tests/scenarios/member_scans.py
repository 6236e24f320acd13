"""What the indices of `Members` must equal: the answers of a scan of all members."""

from __future__ import annotations

from functools import partial
from operator import ge

from andon.protocol.records import Key
from andon_coordinator.core.members import LineMember, Members

__all__ = ["check_indices"]


def check_indices(members: Members) -> None:
    """Asserts that every index gives what a look at each member gives."""
    everybody = list(members)
    live = [each for each in everybody if each.stream is not None]
    heads = {each.head for each in everybody}
    assert [each.worker for each in everybody] == sorted(each.worker for each in everybody)
    assert members.live() == live
    assert members.live_count == len(live)
    graced = [each for each in everybody if each.grace_until is not None]
    assert members.in_grace() == graced
    assert members.any_in_grace == bool(graced)
    assert members.any_exchanging == any(each.exchanges for each in live)
    for each in everybody:
        assert members.get(each.worker) is each
        assert members.of_incarnation(each.request.incarnation) is each
    for each in live:
        assert each.stream is not None
        assert members.on_stream(each.stream) is each
    for head in heads:
        _check_head(members, live, head)
    _check_free(members, everybody)
    _check_times(members, live, graced)


def _check_head(members: Members, live: list[LineMember], head: Key | None) -> None:
    at = [each for each in live if head is not None and each.head == head]
    behind = [each for each in live if head is not None and each.head != head]
    accepting = [each for each in behind if each.accepts_state]
    assert members.in_sync(head) == at
    assert members.in_sync_count(head) == len(at)
    assert members.idle_count(head) == sum(not each.wants_work for each in at)
    unreported = [each for each in at if not each.wants_work and not each.reported_weights]
    assert members.unreported_count(head) == len(unreported)
    assert members.behind(head) == behind
    assert members.behind_accepting(head) == accepting
    assert members.any_behind_accepting(head) == bool(accepting)


def _check_free(members: Members, everybody: list[LineMember]) -> None:
    taken = {
        each.worker for each in everybody if each.stream is not None or each.grace_until is not None
    }
    free = next(slot for slot in range(len(everybody) + 1) if slot not in taken)
    assert members.first_free(len(everybody) + 1) == free
    assert members.first_free(free) is None


def _check_times(members: Members, live: list[LineMember], graced: list[LineMember]) -> None:
    times = {each.heard_at for each in live} | {each.grace_until or 0.0 for each in graced}
    for time in sorted(times):
        silent = [each for each in live if each.heard_at <= time]
        over = [
            each for each in graced if each.grace_until is not None and each.grace_until <= time
        ]
        assert members.silent(partial(ge, time)) == silent
        assert members.grace_over(time) == over
