"""The membership of a worker that is alone: no service, no stream, the steps of a line."""

from __future__ import annotations

import itertools
from dataclasses import replace

from andon.host.manifest import CheckpointFacts
from andon.protocol.capabilities import COORDINATOR_CAPABILITIES
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import cursor_after, next_batch
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.reports import Digest, StepReport
from andon_trainer.errors import LineHalted, RunOver
from andon_trainer.place.position import Position
from andon_trainer.place.talk import Silence
from andon_trainer.timeline import Timeline

__all__ = ["SoloMember"]


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
        self.talk = Silence()
        head = origin.head if origin else Key(1, 0)
        self.position = Position(
            worker=0,
            head=head,
            cursor=origin.cursor if origin else Cursor(0, 0),
            step=origin.step if origin else 0,
            stop_reason=self._end(origin.step) if origin else "",
            pacing=origin.pacing if origin else b"",
            coordinator_can=frozenset(COORDINATOR_CAPABILITIES),
        )
        # Keys rise (rule 1), after a checkpoint too.
        self._rounds = itertools.count(head.round + 1)
        self._term = head.term
        self._reported: StepReport | None = None

    def next_round(self) -> Assigned:
        """Assigns all positions of the next step.

        Raises:
            RunOver: the run is over.
        """
        here = self.position
        if here.stop_reason:
            raise RunOver(f"the run is over: {here.stop_reason}", "", here.step)
        batch = next_batch(here.cursor, self._plan.global_batch, self._plan.epoch_size)
        assigned = Assigned(
            key=Key(self._term, next(self._rounds)),
            parent=here.head,
            roster=(0,),
            rank=0,
            writes_checkpoint=True,
            step=here.step + 1,
            attempt=0,
            epoch=here.cursor.epoch,
            positions=(batch,),
            batch=batch,
        )
        self.position = replace(here, assigned=assigned)
        if self.timeline is not None:
            self.timeline.step_began(assigned.step, 0)
        return assigned

    def catch_up(self) -> None:
        """Does nothing: nobody goes on without the only worker."""

    def leave_epoch(self) -> None:
        """Goes to the next epoch."""
        here = self.position
        self.position = replace(here, cursor=Cursor(here.cursor.epoch + 1, 0))

    def report(self, report: StepReport) -> None:
        """Keeps the report of the current step for `await_commit`."""
        self._reported = report

    def abandon(self, message: str) -> None:
        """Does nothing: no other worker waits."""

    def stop_line(self, kind: str, message: str) -> bool:
        """Raises LineHalted: no operator could answer."""
        reason = HaltReason[kind]
        text = f"worker 0, {reason.label}: {message}"
        raise LineHalted(
            HaltEvidence(id=1, reason=reason, step=self.position.step + 1, worker=0, message=text)
        )

    def hold(self) -> bool:
        """True: nothing makes a round void."""
        return True

    def await_commit(self) -> Committed | None:
        """Commits the step that was reported."""
        report, self._reported = self._reported, None
        here = self.position
        assert report is not None
        assert here.assigned is not None
        # The loop awaits each round that it reports before it asks for the next.
        assert here.assigned.key == report.key
        cursor = cursor_after(here.cursor, here.assigned.batch, self._plan.epoch_size)
        if report.end_of_data:
            cursor = Cursor(here.assigned.epoch + 1, 0)
        step = here.step + 1
        stop_reason = report.stop_reason or self._end(step)
        record = Record(report.key, here.head, RecordKind.STEP, step, cursor, (0,))
        self.position = replace(
            here, head=record.key, cursor=cursor, step=step, stop_reason=stop_reason
        )
        if self.timeline is not None:
            self.timeline.step_over("committed")
        loss = report.loss_sum / report.weight if report.weight else 0.0
        return Committed(
            record=record,
            loss=loss,
            samples=report.samples,
            correct=report.correct,
            stop_reason=stop_reason,
            overflow=report.overflow,
        )

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The value itself; nan for a weight of 0."""
        return (value if weight else float("nan")), weight, 1

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """The data itself."""
        return (data,)

    def compare(self, digest: Digest) -> None:
        """Does nothing: there is no worker to compare with."""

    def _end(self, step: int) -> str:
        total = self._plan.total_steps
        return "steps" if total is not None and step >= total else ""
