"""The membership of a worker that recomputes a run's steps: alone, and as the run's records say.

Theory of operation. `andon audit` starts the run's script once more, alone, with an order (see
`andon.host.audit_files`). The script asks for work as on a line, and gets the batches of the line's
own records, one after another: what was skipped is left out, what was rolled back never comes. What
workers told each other between two steps is answered as the line did. Nothing is decided here:
each step's numbers and a digest of the weights after it are appended to the report, and whoever
started the audit compares them.

Weights are digested where a line would: when the script asks for work, or its loop ends. A script
may hold others meanwhile, such as an EMA's while it evaluates.

The process ends as soon as the weights after the last step are digested. So what stands behind the
script's loop, which may write over the run's own results, does not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from andon.host.audit_files import (
    AuditAnswer,
    AuditOrder,
    AuditRecord,
    AuditReport,
    WeightApart,
    read_order,
)
from andon.host.manifest import CheckpointDamaged, Manifest
from andon.protocol.layout import Layout
from andon.protocol.records import Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.reports import Digest, StepReport
from andon_trainer.errors import JoinRefused
from andon_trainer.place.candidate import Candidate
from andon_trainer.place.member import WorkerMember
from andon_trainer.place.solo import SoloMember

__all__ = ["AuditMember", "AuditedWeights"]

_MAY_DIFFER = frozenset({"total_steps", "total_epochs"})
"""Fields of a plan that decide no step's bits."""


class AuditedWeights(Protocol):
    """The weights of the script that is audited, whatever they are now."""

    def weights(self) -> Digest:
        """Their digest."""

    def apart_from(self, folder: Path) -> WeightApart | None:
        """The first element in which they are not those of a checkpoint."""


class AuditMember(SoloMember):
    """Assigns the batches of a run's records to the only worker, and says what came of each."""

    def __init__(
        self,
        path: Path,
        candidate: Candidate,
        weights: AuditedWeights,
        before_end: Callable[[WorkerMember], None],
        *,
        footprint: Callable[[], Callable[[], str]],
        can_attest: bool,
    ) -> None:
        """Begins at the order's origin.

        Args:
            path: the order.
            candidate: what the script would bring to a line.
            weights: its weights, whatever they are now.
            before_end: called with this member before the process ends.
            footprint: begins to look; its result says what loop bodies have left behind since.
            can_attest: whether this process can hash the sums of grains.

        Raises:
            JoinRefused: the script describes another run.
            OSError, ValueError: the order can't be read.
        """
        order, self._records = read_order(path)
        _refuse_other_run(order, candidate.plan, candidate.layout)
        origin = candidate.origin
        super().__init__(candidate.plan, origin)
        start = order.origin
        if origin is not None and origin.head != start.key:
            raise JoinRefused("plan", f"the audit begins at {start.key}, not at {origin.head}")
        self.position = replace(
            self.position, head=start.key, cursor=start.cursor, step=start.step, stop_reason=""
        )
        self._last_step = order.last_step
        self._weights = weights
        self._before_end = before_end
        self._can_attest = can_attest
        self._footprint = footprint
        self._left_since: Callable[[], str] | None = None
        """Since the step began, of a run without equal bits."""
        self._left_behind = ""
        self._report_file = AuditReport(order.report)
        self._next: AuditRecord | None = None
        """The next record, if it was read already."""
        self._wanted = start.weights
        """Whether the weights of the head are still to be digested."""
        self._checkpoint = start.checkpoint
        """The run's checkpoint with the weights of the head; empty: there is none."""
        self._answers: list[AuditAnswer] = list(start.answers)
        self._sequence = 0
        self._report_file.say("began", step=start.step, arithmetic=dict(candidate.arithmetic))

    def next_round(self) -> Assigned:
        """Assigns the batch of the line's next step."""
        self._digest()
        record = self._up_to_step()
        if record is None:
            self._over()
        self.position = replace(self.position, assigned=None)
        assigned = replace(
            super().next_round(),
            key=record.key,
            epoch=record.epoch,
            batch=record.batch,
            positions=(record.batch,),
            attests=record.attests and self._can_attest,
            itemises_own=True,
        )
        self.position = replace(self.position, assigned=assigned)
        self._left_since = None if self._plan.grain else self._footprint()
        return assigned

    def report(self, report: StepReport) -> None:
        """Keeps it, and what the loop bodies have left behind."""
        super().report(report)
        if self._left_since is not None:
            self._left_behind = self._left_since()

    def catch_up(self) -> None:
        """The script is between two epochs: the line may have begun the next one by a record."""
        self._digest()

    def leave_epoch(self) -> None:
        """Applies the record by which the line went to the next epoch."""
        epoch = self.position.cursor.epoch
        while (record := self._peek()) is not None and record.kind is not RecordKind.STEP:
            self._apply(record)
            if self.position.cursor.epoch != epoch:
                return
        here = self.position
        self._report_file.say("left", step=here.step, message=f"it left epoch {epoch} early")
        self._exit()

    def await_commit(self) -> Committed | None:
        """Applies the record of the step that was reported, and says what was found."""
        record, report = self._peek(), self._reported
        assert record is not None
        assert report is not None
        assert record.key == report.key
        committed = super().await_commit()
        assert committed is not None
        self._report_file.say(
            "step",
            step=record.step,
            loss=committed.loss,
            samples=report.samples,
            weight=report.weight,
            correct=report.correct,
            overflow=report.overflow,
            left_behind=self._left_behind,
            averages=report.averages_digest.hex(),
            attested=[
                [
                    *(it.node.first, len(it.node)),
                    *(part.hex() for part in (it.digest, it.samples, it.components)),
                ]
                for it in report.attested
            ],
        )
        self._apply(record)
        here = Record(
            record.key, committed.record.parent, record.kind, record.step, record.cursor, (0,)
        )
        over = "audited" if record.step >= self._last_step else ""
        self.position = replace(self.position, stop_reason=over)
        return replace(
            committed,
            record=here,
            stop_reason=over,
            overflow=record.overflow,
            gradient_scale=record.gradient_scale,
        )

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """What the line answered; the value itself if the journal has not kept that."""
        answer = self._answered()
        if answer is None:
            return super().scalar_all_reduce(value, weight)
        return answer.value, answer.weight, answer.contributors

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """What the line's workers gave; the data itself if the journal has not kept that."""
        answer = self._answered()
        return super().all_gather(data) if answer is None else answer.data

    def differs(self, batches: list[int]) -> None:
        """Notes that an evaluation gave other sums for these batches than the line has."""
        self._report_file.say("evaluation", step=self.position.step, batches=batches)

    def compare(self, digest: Digest) -> None:
        """The loops are over: digests the weights, and ends the process if the audit is over."""
        self._sequence += 1
        self._digest(digest)
        if self.position.stop_reason:
            self._over()
        self._report_file.say("left", step=self.position.step, message="the script came to its end")

    # ------------------------------------------------------------------ records

    def _peek(self) -> AuditRecord | None:
        if self._next is None:
            self._next = next(self._records, None)
        return self._next

    def _up_to_step(self) -> AuditRecord | None:
        """The next STEP; what comes before it is applied. None: there is none."""
        while (record := self._peek()) is not None and record.kind is not RecordKind.STEP:
            self._apply(record)
        return record

    def _apply(self, record: AuditRecord) -> None:
        self._next = None
        if record.kind is RecordKind.STEP:
            self._answers, self._sequence = [], 0
            self._wanted = record.weights
            self._checkpoint = record.checkpoint
        self._answers += record.answers
        self.position = replace(
            self.position, head=record.key, cursor=record.cursor, step=record.step
        )

    def _answered(self) -> AuditAnswer | None:
        """The line's answer to the next scalar all-reduce at this head."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if any(each.left_out for each in self._answers):
            return None  # Of several that belong together the last ones may be missing.
        return next((each for each in self._answers if each.sequence == sequence), None)

    # ------------------------------------------------------------------ the report

    def _digest(self, digest: Digest | None = None) -> None:
        """Says the digest of the head's weights, if it is wanted and was not said."""
        wanted, self._wanted = self._wanted, False
        if wanted:
            found = digest or self._weights.weights()
            self._report_file.say(
                "weights",
                step=self.position.step,
                sha256=found.sha256.hex(),
                base_hashed=found.base_hashed,
                prefixes=found.prefixes.hex(),
                apart=self._apart_of_checkpoint(found),
            )

    def _apart_of_checkpoint(self, found: Digest) -> dict[str, Any] | None:
        """The first element that the run's checkpoint has otherwise, if its digest is another."""
        if not self._checkpoint:
            return None
        folder = Path(self._checkpoint)
        try:
            digest = Manifest.read(folder).facts.digest
        except (FileNotFoundError, CheckpointDamaged):
            return None  # It was removed meanwhile: the journal has a digest all the same.
        element = None if digest == found.sha256.hex() else self._weights.apart_from(folder)
        return None if element is None else asdict(element)

    def _over(self) -> NoReturn:
        self._report_file.say("over", step=self.position.step)
        self._exit()

    def _exit(self) -> NoReturn:
        """Ends the process at once; its loading processes end with it."""
        self._before_end(self)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _refuse_other_run(order: AuditOrder, plan: RunPlan, layout: Layout) -> None:
    """Raises JoinRefused if a script is not that of the run, as far as can be seen beforehand."""
    for name in RunPlan.__dataclass_fields__:
        mine, theirs = getattr(plan, name), getattr(order.plan, name)
        if name in _MAY_DIFFER or mine == theirs:
            continue
        if name == "data_digest":
            if not (mine and theirs):
                continue
            raise JoinRefused(
                "data",
                f"run {order.run_id} was trained on other samples than the script has now: seed "
                "what splits, shuffles or makes the training set, or give it the data of then",
                component=name, mine=mine, theirs=theirs,
            )  # fmt: skip
        raise JoinRefused(
            "plan",
            f"the {name} of run {order.run_id} is {theirs}, and the script's is {mine}: give "
            "andon audit the run's own command, as in `andon audit RUN -- python train.py --lr 3`",
            component=name, mine=str(mine), theirs=str(theirs),
        )  # fmt: skip
    if order.layout and layout.digest.hex() != order.layout:
        raise JoinRefused(
            "layout",
            f"the script trains another model than run {order.run_id}: its parameters have other "
            "names, types or shapes. Give andon audit the run's own script and arguments",
        )
