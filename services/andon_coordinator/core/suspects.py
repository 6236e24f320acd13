"""Suspects: workers that a late round waits for, and that do not answer when they are asked.

A round that is open for longer than rounds were of late waits for somebody. Then its members are
asked whether they are there (`SendProbe`); their network threads answer at once, whatever their
scripts compute. One that stays silent for longer than `suspicion` allows is cut off, if it can
learn what it misses: the others go on without it, as without a process that is stopped.

Only one that is silent alone is suspected. If two are, the cause may lie here or between, and the
lease decides. The others prove that they are heard, and so that this process listens. If their
answers are slow now, so may be its own: they share hosts and links.

While nothing is late nobody is asked, except for the first answers of a process: without any,
nothing is known of how fast it answers.
"""

from __future__ import annotations

from andon.protocol.capabilities import LEARNING, PROBE
from andon_coordinator.core import departures
from andon_coordinator.core.effects import NoteSuspected, SendProbe
from andon_coordinator.core.events import ProbeAnswered
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["answered", "ask_next", "came_back", "look", "patience_s", "ticked"]

_LEFT = 2
"""So many workers are left in sync at least: one alone can't tell whose silence it is."""

_SLOWER = 2.0
"""It is silent for that many times as long as the slowest of the others took to answer lately."""

_AGAIN_S = 0.1
"""In a late round nobody is asked again sooner; and the later the round is, the rarer."""


def ask_next(core: CoreState, member: LineMember) -> None:
    """Asks the worker after this one, which was heard of just now, if too little is known of it.

    Not this one itself: it sent a message, so nothing held it up a moment ago.
    """
    if not _may_suspect(core):
        return
    other = core.members.live_after(member.worker, core.settings.max_workers)
    if other is None or not _answers_and_learns(other) or other.answers.delays.enough:
        return
    # Heartbeats that carry scalars come more often.
    _ask(core, other, core.settings.liveness.heartbeat_s / 2)


def answered(core: CoreState, member: LineMember, event: ProbeAnswered) -> None:
    """A worker is there, and so fast."""
    member.answers.answered(event.number, core.now, core.lag_s)


def came_back(core: CoreState, before: LineMember | None, member: LineMember) -> float | None:
    """A process joins again, and keeps what is known of its answers.

    Returns:
        For how long it had been silent, if it was suspected by mistake; else None.
    """
    if before is None or before.request.incarnation != member.request.incarnation:
        return None
    member.answers = before.answers
    member.answers.forget_probe()
    return member.answers.came_back(core.now, core.settings.liveness.lease_s)


def ticked(core: CoreState, late_s: float) -> None:
    """A tick came so late: the line did not listen meanwhile, and others may wait as long."""
    core.lag_s += late_s
    core.crowd.ticked(late_s)


def patience_s(core: CoreState, member: LineMember) -> float:
    """After how long a silence a worker is suspected."""
    return member.answers.patience_s(core.now, core.settings.liveness.lease_s, core.crowd.answer_s)


def look(core: CoreState) -> None:
    """Asks the members of a round that is late, and goes on without the one that is silent."""
    round_ = core.round
    if round_ is None or not core.rounds.enough:
        return
    open_s = core.now - round_.opened_at
    if open_s < core.rounds.until_late_s() or not _may_suspect(core):
        return
    members = [each for each in members_of(core, round_) if PROBE in each.request.capabilities]
    if not any(map(_answers_and_learns, members)):
        return
    silent = [each for each in members if _is_silent(core, each)]
    if len(silent) == 1 and _stands_alone(core, round_, silent[0], members):
        _suspect(core, silent[0])
        return
    for member in members:
        _ask(core, member, max(_AGAIN_S, open_s / 2))


def _may_suspect(core: CoreState) -> bool:
    """Whether the line could go on without one of its workers, which would learn."""
    left = core.members.in_sync_count(core.chain.head) - 1
    return left >= max(core.needed, _LEFT) and departures.can_be_followed(core)


def _answers_and_learns(member: LineMember) -> bool:
    return {PROBE, LEARNING} <= member.request.capabilities


def members_of(core: CoreState, round_: StepRound) -> list[LineMember]:
    """The members of a round that are still on its streams, in rank order."""
    members = []
    for worker, stream in zip(round_.roster, round_.streams, strict=True):
        member = core.members.get(worker)
        if member is not None and member.stream == stream:
            members.append(member)
    return members


def _ask(core: CoreState, member: LineMember, apart_s: float) -> None:
    """Asks a worker, unless it has not answered yet, or was asked so short a time ago."""
    answers = member.answers
    if answers.asked_at is None and core.now >= answers.last_at + apart_s:
        assert member.stream is not None
        core.emit(SendProbe(member.stream, answers.ask(core.now, core.lag_s)))


def _silent_s(core: CoreState, member: LineMember) -> float:
    return member.answers.silent_s(core.now, core.lag_s, member.heard_at)


def _is_silent(core: CoreState, member: LineMember) -> bool:
    if member.answers.asked_at is None:
        return False
    return _silent_s(core, member) >= patience_s(core, member)


def _stands_alone(
    core: CoreState, round_: StepRound, suspect: LineMember, members: list[LineMember]
) -> bool:
    """Whether the round waits for a silent worker, and all others were heard meanwhile."""
    if suspect.worker in round_.ready or not _answers_and_learns(suspect):
        return False
    since = suspect.answers.asked_at
    assert since is not None
    others = [each for each in members if each is not suspect]
    if not others or any(each.heard_at <= since for each in others):
        return False
    slowest_s = max(each.answers.lately_s for each in others)
    return _silent_s(core, suspect) >= _SLOWER * slowest_s


def _suspect(core: CoreState, member: LineMember) -> None:
    silent_s, usual_s = _silent_s(core, member), member.answers.delays.usual_s()
    member.answers.suspected()
    why = f"silent for {silent_s:.2f} s when asked; it used to answer in {usual_s:.3f} s"
    core.emit(NoteSuspected(member.worker, silent_s, usual_s))
    departures.go_on_without(core, member, why)
