"""A journal that a test fills."""

from __future__ import annotations

from pathlib import Path

from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.scalars import Scalar
from andon_coordinator.core.effects import (
    SaveAnswer,
    SaveDeparture,
    SaveHalt,
    SaveRecord,
    SaveRunEvent,
    SaveScalars,
)
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.step_results import Skip, StepContribution, StepResult
from andon_coordinator.transport.store import JournalStore

__all__ = ["DIGESTS", "TERM", "Book"]

TERM = 2**32
DIGESTS = {0: bytes.fromhex("9c1e04") * 8, 1: bytes.fromhex("9c1e04") * 8}


class Book:
    """A journal that a test fills."""

    def __init__(
        self, path: Path, run_id: str = "7f3a", *, at: float = 100.0, term: int = TERM
    ) -> None:
        self._now = at
        self._skips = 0
        self._store = JournalStore(path, run_id, sync="normal", clock=self._clock)
        self._store.begin_term(term)

    def _clock(self) -> float:
        return self._now

    def found(self) -> None:
        record = Record(Key(TERM, 1), None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,))
        self._store.save_record(SaveRecord(record))

    def step(
        self,
        step: int,
        loss: float,
        roster: tuple[int, ...] = (0, 1),
        *,
        stop: str = "",
        after_roll_back: bool = False,
        gradient_norm: float | None = None,
        at_position: int | None = None,
        epoch: int = 0,
    ) -> None:
        self._now += 2.0
        start = 4 * step - 4 if at_position is None else at_position
        batch = PositionRange(start, start + 4)
        size = 4 // len(roster)
        parts = tuple(
            StepContribution(
                worker=worker, rank=rank, samples=size, weight=size, loss_sum=size * loss,
                positions=(PositionRange(start + size * rank, start + size * (rank + 1)),),
            )
            for rank, worker in enumerate(roster)
        )  # fmt: skip
        term = 2 * TERM if after_roll_back else TERM
        parent = Key(term, 1 if after_roll_back else step + self._skips)
        cursor = Cursor(epoch, batch.stop)
        record = Record(
            Key(term, step + 1 + self._skips), parent, RecordKind.STEP, step, cursor, roster
        )
        result = StepResult(
            epoch=epoch, batch=batch, loss=loss, samples=4, weight=4.0, attempt=0, seconds=2.0,
            contributions=parts, stop_reason=stop, gradient_norm=gradient_norm,
        )  # fmt: skip
        self._store.save_record(SaveRecord(record, result))

    def skip(self, step: int, *, halt: int, operator: str) -> None:
        """Leaves the batch of `step`, at its usual place, out."""
        batch = PositionRange(4 * step - 4, 4 * step)
        parent = Key(TERM, step + self._skips)
        self._skips += 1
        key = Key(TERM, step + self._skips)
        mark = Record(key, parent, RecordKind.MARK, step - 1, Cursor(0, batch.stop), ())
        self._store.save_record(SaveRecord(mark, skipped=Skip(0, batch, halt, operator)))

    def roll_back(self, *, to_step: int) -> None:
        self._now += 2.0
        self._store.begin_term(2 * TERM)
        cursor = Cursor(0, 4 * to_step)
        back = Record(
            Key(2 * TERM, 1), Key(TERM, to_step + 1), RecordKind.MARK, to_step, cursor, ()
        )
        self._store.save_record(SaveRecord(back, rolls_back=True))

    def leave(self, worker: int, reason: LeaveReason | None, digest: bytes) -> None:
        self._store.save_departure(SaveDeparture(worker, reason, "", 2, digest))

    def drop(self, halt: int, worker: int, operator: str) -> None:
        self._store.save_departure(SaveDeparture(worker, None, "", 2, b"", dropped=True))
        self.answer(halt, HaltAnswer.DROP, worker, operator)

    def set_clock(self, now: float) -> None:
        self._now = now

    def halt(self, evidence: HaltEvidence) -> None:
        self._store.save_halt(SaveHalt(evidence))

    def answer(self, halt: int, answer: HaltAnswer, worker: int | None, operator: str) -> None:
        self._store.save_answer(SaveAnswer(halt, answer, worker, operator))

    def log(self, worker: int, step: int, **values: float) -> None:
        scalars = tuple(Scalar(name, step, value) for name, value in values.items())
        self._store.save_scalars(SaveScalars(worker, scalars))

    def note(
        self, number: int, kind: RunEventKind, worker: int | None, text: str, *, step: int = 2
    ) -> None:
        event = RunEvent(
            id=number, kind=kind, worker=worker, step=step, text=text, at_unix_s=self._now
        )
        self._store.save_run_event(SaveRunEvent(event))

    def close(self) -> None:
        self._store.close()
