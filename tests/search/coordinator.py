"""The coordinator: the real `LineCore`, a journal, and its messages as workers receive them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Key, Record, RecordKind
from andon.protocol.run_settings import Liveness, Policy, RunPlan
from andon.protocol.schedules import Schedule
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core import lost_state
from andon_coordinator.core.join_answers import JoinStatus
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import (
    History,
    LineSettings,
    PacingSettings,
    VerifySettings,
)
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.transport.outgoing import CommitAndAssign
from andon_trainer.core.events import (
    Assigned,
    Committed,
    ControlLost,
    Dismissed,
    Halted,
    LearningAsked,
    LeftOut,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from scenarios.line_bench import LAYOUT
from search.messages import Accepted, Refused, Released
from search.state import Bounds
from search.weights import Wrong

__all__ = ["Journal", "Timer", "core_of", "fire", "heard", "settings", "start", "term", "timers"]

Saved = tuple[Record, StepResult | None]
Save = do.SaveTerm | do.SaveRecord | do.SaveHalt | do.SaveAnswer | do.FindAncestor
Timer = tuple[str, int]
"""Which deadline, of which worker if it is one's."""

_NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Journal:
    """What is durable, and what is still to be written or found."""

    term: int = 0
    records: tuple[Saved, ...] = ()
    halt: HaltEvidence | None = None
    next_halt_id: int = 1
    known: bool = False
    """Whether the run's plan is written down."""
    pending: tuple[Save, ...] = ()

    def written(self) -> tuple[Journal, Save]:
        """The first of what is pending is durable now."""
        save, pending = self.pending[0], self.pending[1:]
        after = replace(self, pending=pending)
        match save:
            case do.SaveTerm(saved):
                return replace(after, term=saved), save
            case do.SaveRecord(record, result):
                if record.key.term < self.term:
                    raise Wrong(f"record {record.key} is of an older term than the journal")
                # A line that wrote a record after a halt had an answer.
                return replace(after, records=(*self.records, (record, result)), halt=None), save
            case do.SaveHalt(evidence):
                return replace(after, halt=evidence, next_halt_id=evidence.id + 1), save
            case do.FindAncestor():
                return after, save
            case do.SaveAnswer(halt_id):
                # A halt that came while the answer's record was being saved is another one.
                is_it = self.halt is not None and self.halt.id == halt_id
                return replace(after, halt=None if is_it else self.halt), save

    def ancestors(self) -> dict[Key, Record]:
        """The records of the line's history."""
        found: dict[Key, Record] = {}
        parent: Key | None = None
        for record, _ in reversed(self.records):
            # A missing parent is one that only workers knew.
            if not found or (parent is not None and record.key <= parent):
                found[record.key], parent = record, record.parent
        return found

    def find_ancestor(self, heads: tuple[Key, ...]) -> Record | None:
        """The newest of these records in the line's history."""
        history = self.ancestors()
        newest = max((head for head in heads if head in history), default=None)
        return None if newest is None else history[newest]

    def given(self, save: Save) -> Journal:
        """Adds something to be written."""
        return replace(self, pending=(*self.pending, save))

    def knows(self) -> Journal:
        """The run's plan is written down."""
        return replace(self, known=True)

    def cut(self) -> Journal:
        """It ends one record earlier."""
        return replace(self, records=self.records[:-1])

    def history(self, plan: RunPlan) -> History:
        """What a coordinator finds in it."""
        head, result = self.records[-1] if self.records else (None, None)
        roster: tuple[int, ...] = ()
        abandoned: Key | None = None
        for (before, _), (record, _) in zip(self.records, self.records[1:], strict=False):
            if record.kind is RecordKind.STEP:
                roster = record.roster
            elif record.kind is RecordKind.MARK and record.parent != before.key:
                roster, abandoned = (), before.key  # It went back.
        return History(
            last_roster=roster,
            abandoned=abandoned,
            head=head,
            result=result,
            greatest_term=self.term,
            halt=self.halt,
            next_halt_id=self.next_halt_id,
            plan=plan if self.known else None,
            layout=LAYOUT if self.known else None,
        )


def settings(bounds: Bounds) -> LineSettings:
    """Settings of the searched line: the search itself decides about silence and failures."""
    local, overlap, fragments = bounds.local, bounds.overlap, bounds.fragments
    return LineSettings(
        run_id="search",
        expect_workers=bounds.expected,
        min_workers=bounds.min_workers,
        max_workers=bounds.workers,
        policy=Policy(
            digest_every=0,
            max_steps=bounds.steps if bounds.ends else None,
            local_steps=fragments * int(local or overlap),
            overlap=overlap,
            fragments=fragments,
            quorum=0.01 if bounds.quorum else None,
            max_late=1,
        ),
        grace_s=0.0,
        pacing=PacingSettings(schedule=Schedule.LOCAL if local or overlap else Schedule.EVERY_STEP),
        liveness=Liveness(lease_s=_NEVER_S),
        rejoin_grace_s=5.0,
        recovery_window_s=5.0,
        max_attempts=1000,
        verify=VerifySettings(fraction=float(bounds.verifies), key=b"a key"),
    )


def term(counter: int) -> int:
    """A term; its random bits are its counter, which no other term has."""
    return (counter << 32) + counter


def start(how: LineSettings, journal: Journal, at: int, plan: RunPlan) -> LineCore:
    """A coordinator in a term that is durable already."""
    return LineCore(how, term=at, history=journal.history(plan), random_bits=_no_bits)


def core_of(line: LineCore) -> CoreState:
    """The core's state."""
    return line._core


def timers(line: LineCore) -> list[Timer]:
    """Deadlines that may pass at any moment."""
    core = core_of(line)
    found = [("grace", each.worker) for each in core.members.in_grace() if each.grace_until]
    if core.attempts.not_before > 0:
        found.append(("back-off", 0))
    for each in core.members.learners():
        if each.learning is not None and each.learning.waits_since == 0.0:
            found.append(("chance", each.worker))
    for each in core.members.late():
        assert each.learning is not None
        if not each.learning.listening and each.learning.began_at == 0.0:
            found.append(("listens", each.worker))
        if each.learning.recalled_at == 0.0:
            found.append(("recalled", each.worker))
    setbacks = core.transfers.setbacks
    found += [("transfer", slot) for slot, each in setbacks.items() if each.not_before > 0]
    gathers = not core.workers_ready_once or lost_state.awaited(core)
    if gathers and core.first_join_at == 0.0 and core.chain.head is not None:
        found.append(("window", 0))
    return found


def fire(line: LineCore, timer: Timer) -> list[do.Effect]:
    """One deadline passes. The clock stands still, so each may pass before or after any other."""
    core, (which, worker) = core_of(line), timer
    member = core.members.get(worker)
    if which == "grace":
        assert member is not None
        member.grace_until = 0.0
    elif which == "chance":
        assert member is not None
        assert member.learning is not None
        member.learning.waits_since = -10.0
    elif which in ("listens", "recalled"):
        assert member is not None
        assert member.learning is not None
        what = "began_at" if which == "listens" else "recalled_at"
        setattr(member.learning, what, -10.0)
    elif which == "back-off":
        core.attempts.not_before = 0.0
    elif which == "transfer":
        setbacks = core.transfers.setbacks
        setbacks[worker] = replace(setbacks[worker], not_before=0.0)
    elif which == "window":
        core.first_join_at = -5.0
    else:
        assert which == "lease"
        assert member is not None
        member.heard_at = -_NEVER_S
    return line.receive(on.TimePassed(), 0.0)


def heard(  # noqa: C901 (one case an effect)
    effect: do.Effect | CommitAndAssign, term_now: int
) -> object:
    """What arrives at the worker; None if nothing does."""
    match effect:
        case CommitAndAssign(committed, assign):
            record, next_ = heard(committed, term_now), heard(assign, term_now)
            assert isinstance(record, Committed)
            assert isinstance(next_, Assigned)
            return replace(record, next=next_)
        case do.AcceptJoin():
            in_sync = effect.join_status is JoinStatus.IN_SYNC
            behind = effect.join_status is JoinStatus.BEHIND
            return Accepted(in_sync, behind, effect.head, term_now, effect.halt)
        case do.RefuseJoin(_, refusal):
            return Refused(refusal.reason.name)
        case do.CloseStream(stream, message):
            return ControlLost(stream, message)
        case do.Assign(_, work):
            return Assigned(
                key=work.key,
                parent=work.parent,
                roster=work.roster,
                rank=work.rank,
                step=work.step,
                attempt=work.attempt,
                epoch=work.epoch,
                positions=work.positions,
                batch=work.batch,
                ahead=work.ahead,
                ahead_batch=work.ahead_batch,
                fragment=work.fragment,
                attends=work.attends,
                attests=work.attests,
                verifies=work.verifies,
                anew=work.anew,
                itemised=work.itemised,
                sums=work.sums,
            )
        case do.SendCommitted(_, record, _, stop_reason):
            return Committed(record=record, stop_reason=stop_reason)
        case do.SendVoided(_, key, message):
            return Voided(key, message)
        case do.SendHalt(_, evidence):
            return Halted(evidence)
        case do.SendResume(_, halt_id):
            return Resumed(halt_id)
        case do.SendScalarAllReduceResult():
            return ScalarAllReduceDone(
                effect.head, effect.sequence, effect.value, effect.weight, effect.contributors
            )
        case do.SendTransfer():
            return TransferAsked(
                transfer_id=effect.transfer_id,
                head=effect.head,
                sends=effect.role is TransferRole.SEND,
                step=effect.step,
                cursor=effect.cursor,
                beside_training=effect.beside_training,
            )
        case do.SendLearn():
            return LearningAsked()
        case do.SendLate(_, key):
            return LeftOut(key)
        case do.SendShutdown(_, message) if "(notice: " in message:
            return Released()
        case do.SendShutdown(_, message, stop_reason) if stop_reason:
            return Dismissed(message, stop_reason)
        case _:
            return None


def _no_bits() -> int:
    return 1
