"""A worker's membership as a step sees it, and the membership of a worker that is alone.

A step asks for work, reports, and waits for its commit. On a line `Membership` does that over gRPC;
alone `SoloMember` does it in this process, with no service and no threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from andon.host.manifest import CheckpointFacts
from andon.protocol.capabilities import COORDINATOR_CAPABILITIES
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import Scalar
from andon.protocol.shards import cursor_after, next_batch
from andon_trainer.core.events import Assigned, Committed, TransferAsked
from andon_trainer.core.reports import Digest, LeaveReport, StepReport
from andon_trainer.errors import LineHalted, RunOver
from andon_trainer.timeline import Timeline

__all__ = ["RunMember", "SoloMember"]


class RunMember(Protocol):
    """A worker's place in a run. Used by one thread."""

    @property
    def worker(self) -> int | None:
        """The number that the line gave this worker; None before it has joined."""

    @property
    def head(self) -> Key | None:
        """The key of the last record that this worker applied; None before there is one."""

    @property
    def cursor(self) -> Cursor:
        """The next position of the data."""

    @property
    def step(self) -> int:
        """Number of committed steps."""

    @property
    def assigned(self) -> Assigned | None:
        """The current round's assignment; None before the first."""

    @property
    def stop_reason(self) -> str:
        """Why the run is over; empty if it is not."""

    @property
    def doubts(self) -> int:
        """Counts the times when a gradient that was computed before must not be sent again."""

    @property
    def installed_from(self) -> TransferAsked | None:
        """The transfer that brought the state which was installed last; None: its own state."""

    @property
    def timeline(self) -> Timeline | None:
        """Where what this worker does is recorded; None: nowhere."""

    @property
    def pacing(self) -> bytes:
        """What the line knows of its workers' speed, for a checkpoint; nobody here reads it."""

    @property
    def digest_every(self) -> int:
        """The interval, in steps, at which workers compare digests of their weights; 0: never."""

    @property
    def coordinator_can(self) -> frozenset[str]:
        """What the coordinator can do that one of an earlier version can't."""

    def next_round(self) -> Assigned:
        """Asks for work and waits for it."""

    def catch_up(self) -> None:
        """Gets the line's state between two epochs, if the line has gone on without this worker."""

    def leave_epoch(self) -> None:
        """Ends the current epoch on all workers: the script left its batches."""

    def report(self, report: StepReport) -> None:
        """Reports that all averages of the round are here."""

    def abandon(self, message: str) -> None:
        """Gives the current round up: all workers try the step again."""

    def stop_line(self, kind: str, message: str) -> None:
        """Halts the line between two steps; returns once an operator has answered."""

    def hold(self) -> bool:
        """Notes that all exchanges of the round are done; False if the round is void."""

    def await_commit(self) -> Committed | None:
        """Waits for the round's record; None if the round is void."""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The weighted mean over the roster, the total weight, and the number of contributors."""

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """What each worker of the roster gives, in the same order on all of them."""

    def compare(self, digest: Digest) -> None:
        """Compares the weights that the loop ended with against all other workers'."""

    def wrote(self, step: int, folder: str) -> None:
        """Notes a checkpoint that this worker wrote; the line is told with the next message."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Gives the line what the script logged."""

    def show(self, activity: str, detail: str = "") -> None:
        """Sets what others see this worker do: a name of `andon.v1.Activity`."""

    def leave(self, departure: LeaveReport) -> None:
        """Leaves the run."""


class SoloMember:
    """Assigns every position to the only worker, and commits every step that it reports."""

    def __init__(
        self,
        plan: RunPlan,
        origin: CheckpointFacts | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Begins after the checkpoint `origin`, or at the first position."""
        self._plan = plan
        self.timeline = timeline
        self.head: Key | None = origin.head if origin else Key(1, 0)
        self.cursor = origin.cursor if origin else Cursor(0, 0)
        self.step = origin.step if origin else 0
        self._rounds = itertools.count(self.head.round + 1)
        self._term = self.head.term
        self._reported: StepReport | None = None
        self.assigned: Assigned | None = None
        self.stop_reason = self._end() if origin else ""
        self.doubts = 0
        self.pacing = origin.pacing if origin else b""

    @property
    def worker(self) -> int:
        """0: there is no other."""
        return 0

    @property
    def installed_from(self) -> TransferAsked | None:
        """None: no other worker could send a state."""
        return None

    @property
    def digest_every(self) -> int:
        """0: there is no worker to compare with."""
        return 0

    @property
    def coordinator_can(self) -> frozenset[str]:
        """Everything: nobody of another version takes part."""
        return frozenset(COORDINATOR_CAPABILITIES)

    def next_round(self) -> Assigned:
        """Assigns all positions of the next step.

        Raises:
            RunOver: the run is over.
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
            step=self.step + 1,
            attempt=0,
            epoch=self.cursor.epoch,
            positions=(batch,),
            batch=batch,
        )
        if self.timeline is not None:
            self.timeline.step_began(self.assigned.step, 0)
        return self.assigned

    def catch_up(self) -> None:
        """Does nothing: nobody goes on without the only worker."""

    def leave_epoch(self) -> None:
        """Goes to the next epoch."""
        self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def report(self, report: StepReport) -> None:
        """Keeps the report of the current step for `await_commit`."""
        self._reported = report

    def abandon(self, message: str) -> None:
        """Does nothing: no other worker waits."""

    def stop_line(self, kind: str, message: str) -> None:
        """Raises LineHalted: no operator could answer."""
        reason = HaltReason[kind]
        text = f"worker 0, {reason.label}: {message}"
        raise LineHalted(
            HaltEvidence(id=1, reason=reason, step=self.step + 1, worker=0, message=text)
        )

    def hold(self) -> bool:
        """True: nothing makes a round void."""
        return True

    def await_commit(self) -> Committed | None:
        """Commits the step that was reported."""
        report, self._reported = self._reported, None
        assert report is not None
        assert self.assigned is not None
        assert self.assigned.key == report.key
        self.cursor = cursor_after(self.cursor, self.assigned.batch, self._plan.epoch_size)
        if report.end_of_data:
            self.cursor = Cursor(self.assigned.epoch + 1, 0)
        self.step += 1
        self.stop_reason = report.stop_reason or self._end()
        record = Record(report.key, self.head, RecordKind.STEP, self.step, self.cursor, (0,))
        self.head = record.key
        if self.timeline is not None:
            self.timeline.step_over("committed")
        loss = report.loss_sum / report.weight if report.weight else 0.0
        return Committed(
            record=record,
            loss=loss,
            samples=report.samples,
            correct=report.correct,
            stop_reason=self.stop_reason,
            overflow=report.overflow,
        )

    def _end(self) -> str:
        total = self._plan.total_steps
        return "steps" if total is not None and self.step >= total else ""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The value itself; nan for a weight of 0."""
        return (value if weight else float("nan")), weight, 1

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """The data itself."""
        return (data,)

    def compare(self, digest: Digest) -> None:
        """Does nothing: there is no worker to compare with."""

    def wrote(self, step: int, folder: str) -> None:
        """Does nothing: there is no line to tell."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Does nothing: there is no line. `Line` writes the file of a worker that is alone."""

    def show(self, activity: str, detail: str = "") -> None:
        """Does nothing: nobody watches."""

    def leave(self, departure: LeaveReport) -> None:
        """Does nothing: there is no line to leave."""
