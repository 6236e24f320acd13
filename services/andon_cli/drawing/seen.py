"""Seen: what a watcher of a line has seen so far: its losses, its pace, and what happened.

A status says what a line is doing now. Everything that needs more than one of them is here. Nothing
reads a clock: times are arguments, `now` in monotonic seconds and `at_unix_s` by the calendar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from andon_cli.client import CheckpointStatus, LineStatus, WorkerStatus
from andon_cli.drawing.texts import halted_line
from andon_coordinator.core.run_events import RunEvent, RunEventKind

__all__ = ["Happening", "Seen", "changes_between", "happening_of"]

_LOSSES = 2000
_EVENTS = 50
_PACE_OVER_S = 60.0
"""The pace is that of the last minute, so that the ETA follows a line that became slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened to a line, in words."""

    at_unix_s: float
    kind: str
    """Such as `joined`, `lost` or `halted`."""
    text: str
    step: int = 0
    worker: int | None = None


def happening_of(event: RunEvent) -> Happening:
    """A run event of the journal in the words in which a watcher tells what it sees."""
    who = "" if event.worker is None else f"worker {event.worker} "
    match event.kind:
        case RunEventKind.JOINED:
            text = f"{who}joined {event.text}"
        case RunEventKind.HALTED:
            text = f"HALTED at step {event.step}: {event.text}"
        case RunEventKind.ANSWERED:
            text = f"the halt at step {event.step} was answered: {event.text}"
        case RunEventKind.ATTEMPT:
            text = f"step {event.step} is tried again, {event.text}"
        case RunEventKind.CHECKPOINT:
            text = f"checkpoint at step {event.step}"
        case RunEventKind.CHECKPOINT_MISSED:
            text = f"there is no checkpoint of step {event.step}: {event.text}"
        case RunEventKind.COMPLETE:
            text = f"complete {event.text}"
        case RunEventKind.LEFT | RunEventKind.LOST | RunEventKind.DROPPED:
            text = f"{who}left ({event.text})"
        case _:
            text = f"{who}{event.text}"
    return Happening(
        at_unix_s=event.at_unix_s,
        kind=event.kind.value,
        text=text,
        step=event.step,
        worker=event.worker,
    )


class Seen:
    """What the statuses of one line have shown so far."""

    def __init__(
        self, losses: Sequence[float] = (), events: Sequence[Happening] = (), *, first_step: int = 0
    ) -> None:
        """Begins with what is known from elsewhere, such as the run's journal.

        Args:
            losses: of steps before the first status, first to last.
            events: from before the first status, first to last.
            first_step: the last step whose loss is among `losses`.
        """
        self.losses: deque[float] = deque(losses, maxlen=_LOSSES)
        self.events: deque[Happening] = deque(events, maxlen=_EVENTS)
        self._shown_step = first_step
        self._last: LineStatus | None = None
        self._pace: deque[tuple[float, int]] = deque()

    def note(self, status: LineStatus, now: float, at_unix_s: float) -> list[Happening]:
        """Takes a status in. Returns what happened since the one before."""
        happened = [] if self._last is None else changes_between(self._last, status, at_unix_s)
        self.events.extend(happened)
        if status.step > self._shown_step and status.loss is not None:
            self.losses.append(status.loss)
        self._shown_step = status.step
        self._note_pace(status, now)
        self._last = status
        return happened

    @property
    def last(self) -> LineStatus | None:
        """The last status; None before the first one."""
        return self._last

    @property
    def step_s(self) -> float | None:
        """How long a step takes now, in seconds; None before the first one."""
        if len(self._pace) > 1:
            (began, first), (ended, last) = self._pace[0], self._pace[-1]
            if last > first and ended > began:
                return (ended - began) / (last - first)
        status = self._last
        if status is None or status.samples_per_second <= 0:
            return None
        return status.samples / status.samples_per_second

    @property
    def eta_s(self) -> float | None:
        """When the run will be over, in seconds from now; None if that is not known."""
        status, step_s = self._last, self.step_s
        if status is None or step_s is None or not status.total_steps:
            return None
        return step_s * max(0, status.total_steps - status.step)

    def _note_pace(self, status: LineStatus, now: float) -> None:
        if status.state not in ("RUNNING", "DRAINING"):
            # Time in which the line waits says nothing of how fast it steps.
            self._pace.clear()
            return
        if self._pace and self._pace[-1][1] > status.step:  # it was rolled back
            self._pace.clear()
        if not self._pace or self._pace[-1][1] < status.step:
            self._pace.append((now, status.step))
        while len(self._pace) > 2 and now - self._pace[0][0] > _PACE_OVER_S:
            self._pace.popleft()


def changes_between(before: LineStatus, after: LineStatus, at_unix_s: float) -> list[Happening]:
    """What happened to a line between two of its statuses, in the order in which people tell it."""
    found = [
        *_workers_that_came_or_went(before, after),
        *_steps_that_failed(before, after),
        *_halts(before, after),
        *_checkpoints(before.checkpoints, after.checkpoints),
    ]
    if after.state == "DRAINING" and before.state != "DRAINING":
        found.append(("draining", "it ends after the current step", None))
    if after.state == "COMPLETE" and before.state != "COMPLETE":
        why = f" ({after.stop_reason})" if after.stop_reason not in ("", "steps", "epochs") else ""
        found.append(("complete", f"complete after step {after.step}{why}", None))
    return [
        Happening(at_unix_s=at_unix_s, kind=kind, text=text, step=after.step, worker=worker)
        for kind, text, worker in found
    ]


_Found = tuple[str, str, int | None]
"""A kind, its text, and the worker."""


def _workers_that_came_or_went(before: LineStatus, after: LineStatus) -> Iterator[_Found]:
    known = {each.worker: each for each in before.workers}
    for worker in after.workers:
        past = known.pop(worker.worker, None)
        if worker.live and (past is None or not past.live):
            what = "joined as a spare" if _is_spare(worker) else "joined"
            yield "joined", f"worker {worker.worker} {what}{_from(worker)}", worker.worker
        elif past is not None and _is_spare(past) and worker.rank is not None:
            yield "joined", f"worker {worker.worker} took a lost worker's place", worker.worker
        elif past is not None and _was_behind(past, before) and worker.rank is not None:
            yield "caught_up", f"worker {worker.worker} has caught up{_from(worker)}", worker.worker
        elif past is not None and past.live and not worker.live:
            if worker.final_digest:
                yield "left", f"worker {worker.worker} left", worker.worker
            else:
                yield "lost", f"worker {worker.worker} was lost{_from(worker)}", worker.worker
    for number in known:
        yield "dropped", f"worker {number} was dropped", number


def _was_behind(worker: WorkerStatus, line: LineStatus) -> bool:
    """Whether a worker got the state of a line that had made steps."""
    if not (worker.live and worker.rank is None and worker.activity == "syncing" and line.step):
        return False
    # While a transfer lasts, its sender has no rank either, and says the same.
    return line.state == "RUNNING" or worker.step < line.step


def _is_spare(worker: WorkerStatus) -> bool:
    return worker.detail.startswith("spare: ")


def _steps_that_failed(before: LineStatus, after: LineStatus) -> Iterator[_Found]:
    if after.step < before.step:
        yield "attempt", f"went back from step {before.step} to step {after.step}", None
    elif after.attempt > before.attempt and after.step == before.step:
        yield "attempt", f"step {after.step + 1} is tried again, attempt {after.attempt}", None


def _halts(before: LineStatus, after: LineStatus) -> Iterator[_Found]:
    was, now = before.halt, after.halt
    if was is not None and (now is None or now.id != was.id):
        yield "answered", f"the halt at step {was.step} was answered", None
    if now is not None and (was is None or now.id != was.id):
        yield "halted", halted_line(now), now.worker


def _checkpoints(
    before: CheckpointStatus | None, after: CheckpointStatus | None
) -> Iterator[_Found]:
    if after is None:
        return
    if after.step and (before is None or after.step != before.step):
        yield "checkpoint", f"checkpoint at step {after.step}", after.writer
    if after.overdue and (before is None or after.overdue != before.overdue):
        yield "checkpoint_missed", f"there is no checkpoint of step {after.overdue}", after.writer


def _from(worker: WorkerStatus) -> str:
    return f" ({worker.host})" if worker.host else ""
