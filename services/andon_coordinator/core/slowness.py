"""Slowness: notices that the line waits for a worker, asks it why, and tells people.

Theory of operation. A round that is open for longer than rounds were of late is *late*: beyond
1.5 times their median, and beyond their usual spread, and at least 0.3 s beyond. Then
somebody holds it up. Who that is can't be told from here: with an all-reduce nobody is ready before
the slowest has sent. So the members are asked what they do (`SendExplain`), those first that say
that they still work. The ones whose scripts wait in the exchange wait for the others; the rest is
what they wait for. If all of them wait, or none, the scripts tell nothing: then who lacks most on
its host (processor, memory) holds the line up, one worker of each host, since the stack of a worker
that is short of processor may be anywhere. If no host lacks anything, and all wait, it is the
network, and the culprit is who has most to send; and if none waits, the line is slow as a whole,
and nobody holds up anybody.

Without a round, the line waits for those that have not asked for work though another one has.

A worker that is a little slower in every step makes no round late. It shows in the waits that come
with each step: if one worker is last in 12 of 16 steps, and the others wait for it for much
of each, it is asked in the middle of the next such wait, or, if that is too short to be met, told
of by its times alone.

A lateness is asked about once, unless nothing came of it. Nothing is decided by the answers: they
are for people, and a worker may lie in them. People are told of each; the journal keeps a few.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from andon.protocol.capabilities import EXPLAINS
from andon.protocol.records import Key
from andon.protocol.slowness import Explanation, Slowness, SlowPhase
from andon_coordinator.core.effects import NoteSlowness, SaveSlowness, SendExplain
from andon_coordinator.core.events import ExplanationArrived
from andon_coordinator.core.lateness import LEAST_S, STEPS, Question, StepWaits, late_after_s
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.slow_cause import UNSENT_BYTES, host_lacks
from andon_coordinator.core.slow_words import by_heartbeat, by_timings, sentence
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.status import holds_up
from andon_coordinator.core.suspects import members_of

__all__ = ["committed", "explained", "look"]

_MOST_ASKED = 16
"""So many members of a round are asked at most."""
_PATIENCE_S = 1.5
"""So long for an answer; then those that came are looked at."""
_LONGEST_S = 60.0
"""An answer that comes so late is of a process that stood still; after it nobody waits for it."""
_TRIES = 8

_LAST_IN, _WAITED = 12, 0.3
"""Slow in every step: last in so many of the last steps, and the others wait 30 % of each."""

_HOUR_S = 3600.0
_KEPT_AN_HOUR, _KEPT_OF_A_WORKER = 12, 4


# ----------------------------------------------------------------------------- on each tick


def look(core: CoreState) -> None:
    """Asks about a lateness, and tells what came of it. Called on each tick."""
    watch = core.slowness
    if core.line_state not in (LineState.RUNNING, LineState.DRAINING):
        watch.question = watch.idle_since = None
        return
    if watch.question is not None:
        _settle_if_due(core, watch.question)
    if watch.question is None:
        _ask_if_late(core)


def explained(core: CoreState, member: LineMember, event: ExplanationArrived) -> None:
    """A worker says what it does."""
    question = core.slowness.question
    answer = event.explanation
    if question is None or question.numbers.get(member.worker) != answer.number:
        return
    over_at = _over_at(core, question)
    facts = answer.facts
    # Taken after the lateness was over it would tell of the step that followed.
    if over_at is not None and facts.held_s < LEAST_S and core.now - facts.apart_s > over_at:
        del question.numbers[member.worker]
    else:
        question.answers[member.worker] = answer
    _settle_if_due(core, question)


def _ask_if_late(core: CoreState) -> None:
    watch, round_ = core.slowness, core.round
    if round_ is not None:
        watch.idle_since = None
        if not core.rounds.enough:
            return
        open_s, usual_s = core.now - round_.opened_at, statistics.median(core.rounds.kept)
        late_s = open_s - usual_s
        after_s = late_after_s(core.rounds)
        if watch.due_s is not None and watch.due_s < after_s:
            after_s, late_s = watch.due_s, max(0.0, open_s - watch.due_s)
        if open_s >= after_s and _may_ask(core, round_.key, open_s):
            _ask(core, round_.key, late_s, _suspects(core, round_), alone=len(round_.roster) == 1)
        return
    idle = _idle(core)
    if not idle:
        watch.idle_since = None
        return
    if watch.idle_since is None:
        watch.idle_since = core.now
    open_s = core.now - watch.idle_since
    if not core.rounds.enough:
        return  # Scripts begin: one compiles, another one reads.
    if open_s >= LEAST_S + statistics.median(core.rounds.kept) / 2 and _may_ask(core, None, open_s):
        _ask(core, None, open_s, idle, others_wait=True)


def _may_ask(core: CoreState, key: Key | None, open_s: float) -> bool:
    """Whether this lateness is to be asked about (again)."""
    watch = core.slowness
    of, tries, at = watch.tries
    # Between two rounds the head tells one lateness from another.
    mine = key or core.chain.head
    if of != mine:
        tries, at = 0, 0.0
    if tries >= _TRIES or core.now < at:
        return False
    watch.tries = mine, tries + 1, core.now + max(LEAST_S, open_s / 2)
    return True


def _suspects(core: CoreState, round_: StepRound) -> list[LineMember]:
    """Members whose averages are missing, those first that say that they still work."""
    members = [each for each in members_of(core, round_) if each.worker not in round_.ready]
    return sorted(members, key=lambda each: not each.works)


def _idle(core: CoreState) -> list[LineMember]:
    """Members in sync that have not asked for work, though another one has."""
    head = core.chain.head
    if core.pending_record is not None or len(core.transfers) or core.stop_reason:
        return []
    if not 0 < core.members.idle_count(head) < core.members.in_sync_count(head):
        return []
    return [each for each in core.members.in_sync(head) if not each.wants_work]


def _ask(
    core: CoreState,
    key: Key | None,
    late_s: float,
    members: Sequence[LineMember],
    *,
    alone: bool = False,
    others_wait: bool = False,
) -> None:
    watch, numbers = core.slowness, {}
    asked = members[:_MOST_ASKED]
    for member in asked:
        if EXPLAINS in member.request.capabilities:
            assert member.stream is not None
            watch.number += 1
            numbers[member.worker] = watch.number
            core.emit(SendExplain(member.stream, watch.number))
    watch.question = question = Question(
        key=key,
        step=core.chain.step + 1,
        late_s=late_s,
        asked_at=core.now,
        numbers=numbers,
        alone=alone,
        # Those beyond the limit are the ones that do not say that they work.
        others_wait=others_wait or any(each.exchanges for each in members[_MOST_ASKED:]),
    )
    _settle_if_due(core, question)


# ------------------------------------------------------------------------------- the answers


def _settle_if_due(core: CoreState, question: Question) -> None:
    watch = core.slowness
    missing = question.numbers.keys() - question.answers.keys()
    waited_s = core.now - question.asked_at
    if missing and waited_s < _PATIENCE_S:
        return
    if missing and waited_s < _LONGEST_S and all(map(_waits, question.answers.values())):
        # All that have answered wait, so it is one that has not: its process stands still.
        return
    watch.question = None
    guilty = _guilty(core, question)
    for worker in guilty:
        _tell(core, question, worker)
    if guilty:
        watch.tries = (watch.tries[0], _TRIES, 0.0)
        watch.due_s = None
        for worker in guilty:
            watch.told[worker] = core.now
    elif watch.tries[1] >= _TRIES:
        watch.due_s = None


def _over_at(core: CoreState, question: Question) -> float | None:
    """Since when nobody waits any more for what was asked about; None: somebody does."""
    round_ = core.round
    if question.over_at is not None or round_ is None or round_.key == question.key:
        return question.over_at
    return round_.opened_at


def _guilty(core: CoreState, question: Question) -> list[int]:
    """The workers that the others wait for, as the answers say; at most three."""
    answers = question.answers
    if question.key is None:
        return sorted(answers)[:3] or _silent_ones(core, question)
    work = [worker for worker, answer in answers.items() if not _waits(answer)]
    if work:
        waits = question.alone or question.others_wait or len(work) < len(answers)
        return sorted(work)[:3] if waits else _starved(core, answers)
    if mute := _silent_ones(core, question):
        return mute
    if len(answers) < len(question.numbers):
        return []
    if starved := _starved(core, answers):
        return starved
    # Everybody waits: for the network. Who has most to send, or loses most, holds it up.
    worst = max(answers, key=lambda each: _unsent(answers[each]), default=None)
    return [] if worst is None or not any(_unsent(answers[worst])) else [worst]


def _starved(core: CoreState, answers: Mapping[int, Explanation]) -> list[int]:
    """Of each host that lacks something, the worker that lacks most; at most three."""
    worst: dict[str, tuple[float, int]] = {}
    for worker, answer in answers.items():
        member, lacks = core.members.get(worker), host_lacks(answer)
        if member is not None and lacks:
            host = member.request.node_id
            worst[host] = max(worst.get(host, (0.0, worker)), (lacks, worker))
    return sorted(worker for _, worker in sorted(worst.values(), reverse=True)[:3])


def _silent_ones(core: CoreState, question: Question) -> list[int]:
    """Members of a version that can't be asked, and that said last that they work."""
    round_ = core.round
    members = _idle(core) if round_ is None else _suspects(core, round_)
    if round_ is not None and question.key != round_.key:
        return []
    found = [
        each.worker for each in members if EXPLAINS not in each.request.capabilities and each.works
    ]
    return found[:3] if len(found) < len(members) or question.others_wait else []


def _waits(answer: Explanation) -> bool:
    return answer.phase is SlowPhase.EXCHANGE


def _unsent(answer: Explanation) -> tuple[int, int]:
    facts = answer.facts
    # Less than a window's worth is on its way on any connection that is used.
    unsent = facts.unsent_bytes or 0
    return (unsent if unsent >= UNSENT_BYTES else 0), facts.retransmitted or 0


def _tell(core: CoreState, question: Question, worker: int) -> None:
    answer = question.answers.get(worker)
    member = core.members.get(worker)
    if answer is not None:
        slow = Slowness(
            worker=worker,
            step=question.step,
            phase=answer.phase,
            late_s=question.late_s,
            text=sentence(worker, answer),
            guilty=answer.guilty,
            at_unix_s=core.wall,
            stacks=answer.stacks,
            facts=answer.facts,
        )
    elif member is not None:
        phase, text = by_heartbeat(worker, member.activity, member.detail, member.use)
        slow = Slowness(
            worker=worker,
            step=question.step,
            phase=phase,
            late_s=question.late_s,
            text=text,
            at_unix_s=core.wall,
        )
    else:
        return
    _note(core, slow)


def _note(core: CoreState, slow: Slowness) -> None:
    """Tells people, and has the journal keep it if there is room in this hour."""
    watch = core.slowness
    watch.latest[slow.worker] = slow
    watch.recent.append(slow)
    core.emit(NoteSlowness(slow))
    while watch.kept and watch.kept[0][0] <= core.now - _HOUR_S:
        watch.kept.popleft()
    what = slow.worker, slow.phase, str(slow.guilty)
    same = any(each[1:] == what for each in watch.kept)
    of_worker = sum(1 for each in watch.kept if each[1] == slow.worker)
    if not same and len(watch.kept) < _KEPT_AN_HOUR and of_worker < _KEPT_OF_A_WORKER:
        watch.kept.append((core.now, *what))
        core.emit(SaveSlowness(slow))


# --------------------------------------------------------------------------- slow in every step


def committed(core: CoreState, round_: StepRound, seconds: float) -> None:
    """A round is complete: who was last in it, and for how long the others waited."""
    watch = core.slowness
    if watch.question is not None and watch.question.key == round_.key:
        watch.question.over_at = core.now
    timings = {worker: ready.timings for worker, ready in round_.in_rank_order if ready.samples}
    if len(timings) < 2 or seconds <= 0:
        watch.waits.clear()
        return
    last = holds_up({worker: each.wait_s / seconds for worker, each in timings.items()})
    waited_s = 0.0
    if last is not None:
        others = [each.wait_s for worker, each in timings.items() if worker != last]
        waited_s = statistics.median(others) - timings[last].wait_s
    watch.waits.append(StepWaits(last, waited_s, seconds, timings))
    if last is None or len(watch.waits) < STEPS or watch.due_s is not None:
        return
    mine = [each for each in watch.waits if each.last == last]
    if len(mine) < _LAST_IN:
        return
    waited_s = statistics.median(each.waited_s for each in mine)
    step_s = statistics.median(each.seconds for each in mine)
    told_at, member = watch.told.get(last), core.members.get(last)
    if waited_s < _WAITED * step_s or (told_at is not None and core.now < told_at + _HOUR_S):
        return
    if waited_s >= LEAST_S and member and EXPLAINS in member.request.capabilities:
        # In the middle of the wait: the others are in the exchange by then, and it is not.
        watch.due_s = step_s - waited_s / 2
        return
    watch.told[last] = core.now
    phase, text = by_timings(last, [each.timings for each in mine])
    _note(
        core,
        Slowness(
            worker=last,
            step=round_.terms.step,
            phase=phase,
            late_s=waited_s,
            text=text,
            at_unix_s=core.wall,
        ),
    )
