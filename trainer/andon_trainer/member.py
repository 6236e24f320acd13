"""A member of the line, as a step sees it: on a line (`Membership`), or alone (`SoloMember`)."""

from __future__ import annotations

import itertools
from typing import Protocol

from andon.host.manifest import CheckpointFacts
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import cursor_after, next_batch
from andon_trainer.core.events import Assigned, Committed, TransferAsked
from andon_trainer.core.reports import Digest, LeaveReport, StepReport
from andon_trainer.errors import LineHalted, RunOver

__all__ = ["Member", "SoloMember"]


class Member(Protocol):
    """A worker's place: on a line (`Membership`) or alone (`SoloMember`)."""

    @property
    def head(self) -> Key | None:
        """The key of the last record; None before there is one."""

    @property
    def cursor(self) -> Cursor:
        """The next position of the data."""

    @property
    def step(self) -> int:
        """Steps committed."""

    @property
    def assigned(self) -> Assigned | None:
        """The present round."""

    @property
    def stop_reason(self) -> str:
        """Why the run is over; empty if it is not."""

    @property
    def doubts(self) -> int:
        """How often what this worker computed became worthless for another try."""

    @property
    def installed_from(self) -> TransferAsked | None:
        """The transfer that brought the state which was installed last; None: its own."""

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""

    def next_round(self) -> Assigned:
        """Waits for work."""

    def leave_epoch(self) -> None:
        """Ends the present epoch, for everybody: the script left its batches."""

    def report(self, report: StepReport) -> None:
        """Says that all averages are here."""

    def abandon(self, message: str) -> None:
        """Gives the present round up: everybody tries the step again."""

    def stop_line(self, kind: str, message: str) -> None:
        """Halts the line between two steps; returns once a person has answered."""

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""

    def await_commit(self) -> Committed | None:
        """Waits for the record; None if the round is void."""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The weighted mean over the roster, the total weight, and how many workers gave one."""

    def compare(self, digest: Digest) -> None:
        """Has the weights that the loop ended with compared with all others'."""

    def wrote(self, step: int, folder: str) -> None:
        """Says that a checkpoint was written."""

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do."""

    def leave(self, departure: LeaveReport) -> None:
        """Says good-bye."""


class SoloMember:
    """Deals every position to the one worker there is, and commits every step it reports."""

    def __init__(self, plan: RunPlan, origin: CheckpointFacts | None = None) -> None:
        """Stands where a checkpoint does, or at the first position with this worker's weights."""
        self._plan = plan
        self.head: Key | None = origin.head if origin else Key(1, 0)
        self.cursor = origin.cursor if origin else Cursor(0, 0)
        self.step = origin.step if origin else 0
        self._rounds = itertools.count(self.head.round + 1)
        self._term = self.head.term
        self._ready: StepReport | None = None
        self.assigned: Assigned | None = None
        self.stop_reason = self._end() if origin else ""
        self.doubts = 0

    @property
    def installed_from(self) -> TransferAsked | None:
        """None: there is nobody to get a state from."""
        return None

    @property
    def digest_every(self) -> int:
        """Never: there is nobody to compare with."""
        return 0

    def next_round(self) -> Assigned:
        """The next step's positions, all of them.

        Raises:
            RunOver: there is none.
        """
        if self.stop_reason:
            raise RunOver(f"the run is over: {self.stop_reason}", "", self.step)
        batch = next_batch(self.cursor, self._plan.global_batch, self._plan.epoch_size)
        self.assigned = Assigned(
            key=Key(self._term, next(self._rounds)),
            parent=self.head,
            roster=(0,),
            rank=0,
            writes_checkpoint=True,
            world_size=1,
            step=self.step + 1,
            attempt=0,
            epoch=self.cursor.epoch,
            positions=(batch,),
            batch=batch,
        )
        return self.assigned

    def leave_epoch(self) -> None:
        """Goes to the next epoch."""
        self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def report(self, report: StepReport) -> None:
        """Takes the report of the present step."""
        self._ready = report

    def abandon(self, message: str) -> None:
        """Nobody else needs to know."""

    def stop_line(self, kind: str, message: str) -> None:
        """Raises LineHalted: there is nobody else to stop, and nobody to answer."""
        reason = HaltReason[kind]
        said = f"worker 0, {reason.label}: {message}"
        raise LineHalted(
            HaltEvidence(id=1, reason=reason, step=self.step + 1, worker=0, message=said)
        )

    def hold(self) -> bool:
        """Nothing can void a round here."""
        return True

    def await_commit(self) -> Committed | None:
        """Commits the step that was reported."""
        ready, self._ready = self._ready, None
        assert ready is not None
        assert self.assigned is not None
        assert self.assigned.key == ready.key
        self.cursor = cursor_after(self.cursor, self.assigned.batch, self._plan.epoch_size)
        self.step += 1
        self.stop_reason = ready.stop_reason or self._end()
        record = Record(ready.key, self.head, RecordKind.STEP, self.step, self.cursor, (0,))
        self.head = record.key
        loss = ready.loss_sum / ready.weight if ready.weight else 0.0
        return Committed(
            record=record,
            loss=loss,
            samples=ready.samples,
            correct=ready.correct,
            stop_reason=self.stop_reason,
        )

    def _end(self) -> str:
        total = self._plan.total_steps
        return "steps" if total is not None and self.step >= total else ""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The mean of one number is that number."""
        return (value if weight else float("nan")), weight, 1

    def compare(self, digest: Digest) -> None:
        """There is nobody to compare with."""

    def wrote(self, step: int, folder: str) -> None:
        """Nobody is told."""

    def show(self, activity: str, detail: str = "") -> None:
        """Nobody looks."""

    def leave(self, departure: LeaveReport) -> None:
        """Nobody is told."""
