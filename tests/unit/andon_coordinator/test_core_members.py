"""The indices of the members: whatever happens to whom, they equal a look at each member."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.records import Key
from andon_coordinator.core.events import Activity, JoinRequest, ScalarAllReduceArrived
from andon_coordinator.core.members import LineMember, Members
from scenarios.crowd_simulation import LAYOUT, plan_for
from scenarios.member_scans import check_indices

HEADS = [None, Key(1, 1), Key(1, 2), Key(2, 1)]
TIMES = [0.0, 0.5, 1.0, 2.0, 8.0]


def last_weights(head: Key | None) -> ScalarAllReduceArrived:
    return ScalarAllReduceArrived(1, head, 0, 1.0, 1.0, digest=b"d", digest_head=head)


changes = st.one_of(
    st.tuples(st.just("head"), st.sampled_from(HEADS)),
    st.tuples(st.just("wants_work"), st.booleans()),
    st.tuples(st.just("accepts_state"), st.booleans()),
    st.tuples(st.just("activity"), st.sampled_from(list(Activity))),
    st.tuples(st.just("last_weights"), st.sampled_from([None, *map(last_weights, HEADS)])),
    st.tuples(st.just("heard_at"), st.sampled_from(TIMES)),
    st.tuples(st.just("grace_until"), st.sampled_from([None, *TIMES])),
    st.tuples(st.sampled_from(["put", "remove", "stream"]), st.none()),
)


def member(worker: int, number: int) -> LineMember:
    request = JoinRequest(run_id="7f3a", incarnation=number, layout=LAYOUT, plan=plan_for(1))
    return LineMember(
        worker=worker,
        request=request,
        stream=number,
        head=None,
        held=None,
        step=0,
        heard_at=float(number % 3),
    )


def change(members: Members, worker: int, number: int, name: str, value: Any) -> None:
    """Number: of the change; a stream or a process gets it as its own."""
    there = members.get(worker)
    if name == "put":
        members.put(member(worker, number))
    elif there is not None and name == "remove":
        members.remove(worker)
    elif there is not None and name == "stream":
        there.stream = None if there.stream is not None else number
    elif there is not None:
        setattr(there, name, value)


@settings(deadline=None)  # A busy machine is no defect.
@given(st.lists(st.tuples(st.integers(0, 4), changes), max_size=60))
def test_every_index_equals_a_scan_after_any_changes(
    happened: list[tuple[int, tuple[str, Any]]],
) -> None:
    members = Members()

    for number, (worker, (name, value)) in enumerate(happened, start=1):
        change(members, worker, number, name, value)
        check_indices(members)


def test_a_member_that_was_removed_changes_no_index_any_more() -> None:
    members = Members()
    gone = member(0, 1)
    members.put(gone)
    members.remove(0)

    gone.wants_work, gone.head, gone.heard_at = True, Key(1, 1), 0.0

    assert members.live_count == 0
    assert members.in_sync_count(Key(1, 1)) == 0
    check_indices(members)


def test_nobody_is_in_sync_with_a_line_without_a_head() -> None:
    members = Members()
    members.put(member(0, 1))

    assert members.in_sync(None) == []
    assert members.in_sync_count(None) == 0
    assert members.behind(None) == []
    assert not members.any_behind_accepting(None)
