"""The chronicle: derives run events from the core's events and effects.

The core decides and does not narrate. What people look up later follows from what went in and what
came out, so it is derived beside the core, which knows nothing of it. No decision may depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.limits import clipped
from andon.protocol.records import Key, Record, RecordKind
from andon_coordinator.core import effects, events
from andon_coordinator.core.effects import SaveRunEvent
from andon_coordinator.core.eviction import SlowStep
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.run_events import AGAIN, RunEvent, RunEventKind
from andon_coordinator.core.session_events import (
    AttendRequest,
    RankAttended,
    RankReported,
    RefuseAttendance,
    SaveSessionEnd,
    SendFormed,
    SessionEffect,
    SessionEvent,
)
from andon_coordinator.core.step_results import StepResult

__all__ = ["Chronicle"]


class Chronicle:
    """The run events of one service process; pure, like the core."""

    def __init__(self, *, next_id: int, step: int, resumed: bool) -> None:
        """Begins with the event `started`, which comes with the first call of `receive`.

        Args:
            next_id: of the first event; above all ids that the journal holds.
            step: steps committed so far.
            resumed: whether the journal had anything of this run before.
        """
        self._next_id = next_id
        self._step = step
        self._wall = 0.0
        self._happened: list[SaveRunEvent] = []
        self._begun = False
        self._resumed = resumed
        self._incarnations: dict[int, int] = {}
        """The process that last joined in each slot."""
        self._unsaved: dict[Key, tuple[int, StepResult]] = {}
        """Step and result of records that are not durable yet, if there is something to tell."""
        self._trimmed: int | None = None
        """What the last record's mean left out; None: nothing is known of it."""
        self._round: Key | None = None
        """The last round that was counted as an attempt."""
        self._why = ""
        """Why the last round was void."""
        self._halt = (0, 0)
        """The id and the step of the last halt."""
        self._complete = False

    def receive(
        self,
        event: events.Event,
        done: Sequence[effects.Effect],
        *,
        wall: float,
        state: LineState,
        step: int,
    ) -> list[SaveRunEvent]:
        """What is to be told of an event and its effects, in order.

        Args:
            event: what the core received.
            done: what followed.
            wall: the time, in seconds since the Unix epoch.
            state: the line's state after it.
            step: steps committed after it.
        """
        self._happened, self._wall, self._step = [], wall, step
        if not self._begun:
            self._begun = True
            text = f"the service goes on after step {step}" if self._resumed else "the run began"
            self._tell(RunEventKind.STARTED, None, text)
        match event:
            case events.RecordSaved(key) if key in self._unsaved:
                self._recorded(*self._unsaved.pop(key))
            case events.JournalFailed():
                self._unsaved.clear()
            case _:
                pass
        for effect in done:
            self._did(event, effect)
        if state is LineState.COMPLETE and not self._complete:
            self._complete = True
            self._tell(RunEventKind.COMPLETE, None, f"after {step} steps")
        return self._happened

    def session(
        self, event: SessionEvent, done: Sequence[SessionEffect], *, wall: float
    ) -> list[SaveRunEvent]:
        """The same of something that happened to a session of ranks."""
        self._happened, self._wall = [], wall
        refused = any(isinstance(each, RefuseAttendance) for each in done)
        match event:
            case RankAttended(request=request) if not refused:
                self._tell(RunEventKind.JOINED, request.rank, _attends(request))
            case RankReported(report=report):
                self._step = max(self._step, report.steps)
            case _:
                pass
        for effect in done:
            match effect:
                case SendFormed(rank=0):
                    self._step = 0
                    text = f"{len(effect.roster)} ranks, {effect.key}"
                    self._tell(RunEventKind.SESSION, None, text)
                case SaveSessionEnd(over=None):
                    text = f"all ranks left in order after {effect.steps} steps"
                    self._tell(RunEventKind.SESSION_OVER, None, text, effect.steps)
                case SaveSessionEnd(over=over) if over is not None:
                    text = f"{over.end.label}: {over.message}"
                    self._tell(RunEventKind.SESSION_OVER, over.culprit, text, effect.steps)
                case effects.SaveHalt(evidence):
                    text = f"{evidence.reason.label}: {evidence.message}"
                    self._tell(RunEventKind.HALTED, evidence.worker, text, evidence.step)
                case _:
                    pass
        return self._happened

    def _did(self, event: events.Event, effect: effects.Effect) -> None:
        match effect:
            case effects.AcceptJoin() if isinstance(event, events.WorkerJoined):
                self._joined(effect, event.request)
            case effects.SaveDeparture():
                self._departed(effect)
            case effects.SendVoided():
                self._why = effect.message
            case effects.Assign():
                self._assigned(effect.assignment)
            case effects.SaveHalt(evidence):
                self._why = f"halt {evidence.id} was answered"
                self._halt = evidence.id, evidence.step
                self._tell(
                    RunEventKind.HALTED,
                    evidence.worker,
                    f"{evidence.reason.label}: {evidence.message}",
                    evidence.step,
                )
            case effects.SaveSpike(made):
                text = f"{made.action.value}: {made.what}"
                self._tell(RunEventKind.SPIKE, made.worker, text, made.step)
            case effects.SaveVerdict(worker=int(worker)):
                self._tell(RunEventKind.CONVICTED, worker, effect.text, effect.step)
            case effects.SaveAnswer():
                who = f" by {effect.operator}" if effect.operator else ""
                text = f"{effect.answer.name.lower()}{who}"
                halt, step = self._halt
                # A halt of before this process began was in the step after the head.
                step = step if halt == effect.halt_id else self._step + 1
                self._tell(RunEventKind.ANSWERED, effect.worker, text, step)
            case effects.SaveRecord():
                self._saving(effect.record, effect.result)
            case _:
                self._noted(effect)

    def _saving(self, record: Record, result: StepResult | None) -> None:
        """A record is given to the journal."""
        if result is not None and (result.overflow or result.trimmed != self._trimmed):
            assert record.kind is RecordKind.STEP
            self._unsaved[record.key] = record.step, result

    def _recorded(self, step: int, result: StepResult) -> None:
        """A step's record is durable."""
        if result.overflow:
            text = "scaled gradients overflowed, so no weight moved"
            self._tell(RunEventKind.OVERFLOW, None, text, step)
        before, self._trimmed = self._trimmed, result.trimmed
        if result.trimmed is not None and result.trimmed != before:
            self._tell(RunEventKind.MEAN, None, result.mean_in_words, step)

    def _noted(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SaveSlowness(slow):
                self._tell(RunEventKind.SLOW, slow.worker, slow.text, slow.step)
            case effects.NoteCaughtUp():
                self._tell(RunEventKind.CAUGHT_UP, effect.worker, effect.in_words)
            case effects.NoteSlow():
                dealt = effect.what in (SlowStep.EASED, SlowStep.RECOVERED)
                kind = RunEventKind.EASED if dealt else RunEventKind.EVICTED
                self._tell(kind, effect.worker, effect.in_words)
            case effects.NoteArithmetic():
                self._tell(RunEventKind.ARITHMETIC, effect.worker, effect.in_words)
            case effects.NoteNotice():
                self._tell(RunEventKind.NOTICE, effect.worker, effect.why)
            case effects.NoteWentBack():
                self._tell(RunEventKind.WENT_BACK, None, effect.in_words, effect.step)
            case effects.NoteCheckpoint():
                self._tell(RunEventKind.CHECKPOINT, effect.worker, effect.folder, effect.step)
            case effects.NoteOverdue():
                text = f"the last one is of step {effect.last}"
                self._tell(RunEventKind.CHECKPOINT_MISSED, effect.writer, text, effect.step)

    def _joined(self, accepted: effects.AcceptJoin, request: events.JoinRequest) -> None:
        last = self._incarnations.get(accepted.worker)
        # A process that knows a term was here before this service began.
        known = request.greatest_term > 0
        again = known if last is None else last == request.incarnation
        self._incarnations[accepted.worker] = request.incarnation
        device = next((each.name for each in request.devices if each.name), request.backend)
        where = f"{request.node_id} ({device})" if request.node_id else device
        text = f"{AGAIN}on {where}" if again else f"on {where}"
        if accepted.mistaken_s is not None:
            text += f"; it was suspected wrongly, and is back after {accepted.mistaken_s:.2f} s"
        if accepted.credential:
            text += f", by the token of {accepted.credential}"
        self._tell(RunEventKind.JOINED, accepted.worker, text, accepted.step)

    def _departed(self, gone: effects.SaveDeparture) -> None:
        if gone.dropped:
            kind, why = RunEventKind.DROPPED, "dropped"
        elif gone.reason is None:
            kind, why = RunEventKind.LOST, "lost"
        else:
            kind, why = RunEventKind.LEFT, gone.reason.name.lower()
        self._tell(kind, gone.worker, f"{why}: {gone.message}" if gone.message else why, gone.step)

    def _assigned(self, assignment: effects.Assignment) -> None:
        # One round has an assignment for each member; the first one tells of it.
        if assignment.key == self._round:
            return
        self._round = assignment.key
        if assignment.attempt > 0:
            why = self._why or "the round before was void"
            text = f"attempt {assignment.attempt + 1}: {why}"
            self._tell(RunEventKind.ATTEMPT, None, text, assignment.step)
        self._why = ""

    def _tell(
        self, kind: RunEventKind, worker: int | None, text: str, step: int | None = None
    ) -> None:
        happened = RunEvent(
            id=self._next_id,
            kind=kind,
            worker=worker,
            step=self._step if step is None else step,
            text=clipped(text),
            at_unix_s=self._wall,
        )
        self._next_id += 1
        self._happened.append(SaveRunEvent(happened))


def _attends(request: AttendRequest) -> str:
    device = request.device or request.backend
    where = " ".join(filter(None, (request.node_id, f"({device})" if device else "")))
    return f"waits for the other ranks{f', on {where}' if where else ''}"
