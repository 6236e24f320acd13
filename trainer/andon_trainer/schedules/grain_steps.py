"""Steps on a line of equal bits, whose loop bodies are grains.

Theory of operation. A loop body gets exactly one grain, under the generators and with the buffers
that belong to it (`data.grain_seeds`, `averaging.grain_buffers`). Its gradient is not accumulated
in `p.grad`, but taken out and added along the tree of the batch's grains. So what a worker sends is
a sum for each of its maximal nodes, and the mean has the same bits whoever computed what.

If the step is void, the sums stay. The next share has all of this worker's grains and perhaps more,
so only those are computed, and the nodes grow.

In a verified round the first loop bodies have grains of other workers. They run under the same
generators and from the same buffers as their owners', and their gradients go to sums of their own
(see `averaging.verification`): of losses, weights and counts nothing is kept.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from andon.protocol.grains import Grains
from andon.protocol.limits import MAX_HASHED_SAMPLES
from andon.protocol.records import PositionRange
from andon.protocol.shards import subtract
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.attesting import digest_of
from andon_trainer.averaging.averager import GrainAverager
from andon_trainer.averaging.step_gather import Rows
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.data.feed import MicroBatch, Share
from andon_trainer.data.grain_seeds import GrainSeeds
from andon_trainer.data.sample_hashes import sample_hashes
from andon_trainer.model.graph import Graph
from andon_trainer.schedules.averaged_steps import AveragedSteps
from andon_trainer.schedules.grain_losses import GrainLosses
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.processes import GrainProcesses, OneProcess
from andon_trainer.schedules.step_state import StepPhase, StepState

__all__ = ["GrainStepper"]


class GrainStepper(AveragedSteps):
    """Steps whose gradients are added along the tree of a batch's grains."""

    _averager: GrainAverager
    _processes: GrainProcesses

    def __init__(
        self,
        parts: LoopParts,
        averager: GrainAverager,
        seed: int,
        check: Callable[[], None],
        processes: GrainProcesses | None = None,
    ) -> None:
        """Stands between steps.

        Args:
            parts: of the loop.
            averager: adds the grains.
            seed: the run's.
            check: raises if the script has changed what decides bits.
            processes: those of its host, if there are several.
        """
        super().__init__(parts, averager, processes or OneProcess())
        self._check = check
        self._grain = parts.grain
        self._losses: GrainLosses | None = None
        self._present: int | None = None
        """The grain that the loop body has; None: borrowed samples."""
        self._seeds = GrainSeeds(seed)
        self._seeds.between(self._member.position.step)

    def begin_epoch(self, epoch: int) -> None:
        """The script begins an epoch: what it draws is the same on all workers."""
        super().begin_epoch(epoch)
        self._seeds.epoch(epoch, self._member.position.step)

    def gather(self, data: bytes) -> Rows | None:
        """Refuses: a loss of all workers' samples belongs to no grain."""
        raise RuntimeError(
            "line.gather in a loop body is for a loss of all workers' samples, and with same_bits "
            "each grain is computed by itself: gather between two steps, or leave same_bits out"
        )

    def try_commit(self) -> bool:
        """See `AveragedSteps`; what the script draws next depends on the committed step alone."""
        waits = self._state is not None and self._state.phase is StepPhase.AVERAGED
        moved = super().try_commit()
        if waits:
            self._seeds.between(self._member.position.step)
        return moved

    # ------------------------------------------------------------------ the loop's batches

    def _begin(self, assigned: Assigned) -> StepState:
        if assigned.attests and not self._averager.verification.knows_own:
            self._kept = None  # Its grains were not hashed: the attempt before was not verified.
        if assigned.anew:
            self._kept = None
        return super()._begin(assigned)

    def _begin_attempt(self, state: StepState) -> None:
        assigned, kept = state.assigned, state.kept
        grains = Grains(assigned.batch, self._grain)
        known = None if kept is None else kept.grains
        self._losses = GrainLosses(grains, assigned.positions, known)
        self._averager.begin_grains(
            grains, kept=kept is not None, attests=assigned.attests, anew=assigned.anew
        )

    def _share_left(self, state: StepState) -> Share:
        assigned, kept = state.assigned, state.kept
        # The sums of the others are where these grains are added.
        left = subtract(assigned.positions, () if kept is None else kept.positions)
        return Share(assigned.epoch, left, batch=assigned.batch, grain=self._grain)

    def _verify(self, state: StepState) -> Generator[Any, None, bool]:
        """Loop bodies with the grains that this worker verifies."""
        assigned = state.assigned
        share, after = self._shares_to_verify(state)
        if not len(share):
            return True
        grains = Grains(assigned.batch, self._grain).of(share.ranges)
        left = {grain for part in grains for grain in range(part.start, part.stop)}
        began, first = time.perf_counter(), True
        state.verifying = True
        for micro_batch in self._feeder.batches(share, after):
            if first:
                self._look_at_weights(state)
            first = False
            self._loaded(state, began)
            self.rows.take_none(assigned.step)
            if not (yield from self._body(state, micro_batch)):
                return False
            left.discard(self._grain_at(assigned, micro_batch))
            began = time.perf_counter()
        for grain in left:
            self._note_samples(state, grain, None, 0)
            self._averager.verification.leave_out(grain)
        state.verifying = False
        return True

    def _shares_to_verify(self, state: StepState) -> tuple[Share, Callable[[], Iterator[Share]]]:
        """The grains that this process verifies, and what is loaded after them: its own share."""
        assigned = state.assigned
        grains = (PositionRange(each, each + 1) for each in assigned.verifies)
        ranges = Grains(assigned.batch, self._grain).ranges(grains)
        own = self._share_to_compute(state)
        share = Share(assigned.epoch, ranges, batch=assigned.batch, grain=self._grain)
        share = self._processes.part_of(share, assigned.epoch)
        return share, lambda: itertools.chain((own,), self._shares.upcoming(assigned))

    def _before_body(self, assigned: Assigned, micro_batch: MicroBatch) -> None:
        state = self._state
        assert state is not None
        self._check()
        self._averager.next_grain()
        self._present = None
        if not state.borrowed:
            self._present = self._grain_at(assigned, micro_batch)
            if assigned.attests:
                self._note_samples(state, self._present, micro_batch.batch, micro_batch.samples)
        self._seeds.grain(assigned.epoch, micro_batch.start)

    def _grain_at(self, assigned: Assigned, micro_batch: MicroBatch) -> int:
        return (micro_batch.start - assigned.batch.start) // self._grain

    def _note_samples(self, state: StepState, grain: int, batch: Any, samples: int) -> None:
        """Hashes what the loop body is given, before it can change it."""
        whole = state.assigned.batch
        positions = len(Grains(whole, self._grain).positions(grain))
        divided = len(whole) <= MAX_HASHED_SAMPLES
        hashes = sample_hashes(batch, samples, positions, divided=divided)
        self._averager.verification.note_samples(grain, hashes, verified=state.verifying)

    # ------------------------------------------------------------------ backward

    def _go_backward(
        self,
        state: StepState,
        losses: tuple[torch.Tensor, torch.Tensor],
        given: float,
        graph: Graph,
    ) -> None:
        # From a grain, whose gradient is taken out of `p.grad`.
        loss, reported = losses
        assert self._losses is not None
        self._accumulated.refuse_other(first=not state.micro_batches)
        state.waiting = 0
        if state.verifying:
            self._verify_grain(loss, given, graph)
            return
        value = self._averager.losses.begin(reported, gated=given > 0)
        known = value.here or not (given or state.borrowed)
        if given and known and not math.isfinite(value.number()):
            self._refuse_loss(state, value.number())
            return
        state.micro_batches += 1
        grain = self._present
        if grain is not None:
            self._losses.add(grain, given, value)
        scalar = None
        if given or state.borrowed:
            scalar = graph.goes_back(loss.reshape(()), self._accumulated)
        self._in_backward = True
        try:
            if state.last:
                self._finish(state, scalar, grain, given)
                self._loss_check.collect()
                return
            assert grain is not None
            if scalar is None:
                self._averager.clock.done()
                self._averager.leave_out(grain)
            else:
                scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
                self._averager.clock.done()
                self._averager.take_grain(grain, given)
        finally:
            self._in_backward = False

    def _verify_grain(self, loss: torch.Tensor, given: float, graph: Graph) -> None:
        """Goes backward from a grain of another worker's.

        Its owner halts the line if its loss is not finite. If only this worker's is not, the
        gradients differ.
        """
        assert self._present is not None
        if not given:
            self._averager.clock.done()
            self._averager.verification.leave_out(self._present)
            return
        scalar = graph.goes_back(loss.reshape(()), self._accumulated)
        self._in_backward = True
        try:
            scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        finally:
            self._in_backward = False
        self._averager.clock.done()
        self._averager.verification.take(self._present, given)

    def _finish(
        self, state: StepState, scalar: torch.Tensor | None, grain: int | None, given: float
    ) -> None:
        """Runs the step's last backward, averages and reports."""
        losses = self._losses
        assert losses is not None
        self._accumulation.refuse_other_bodies()
        self._check()
        # Whatever raises below (the script's own backward, a halt), the step is then over.
        state.phase = StepPhase.VOID
        self._kept = None
        self._hooked.look()  # A backward sees a part of the step's samples only.
        if grain is not None and scalar is None:
            self._averager.leave_out(grain)
        stop_wanted = self._processes.share_losses(state, losses, self.stop_wanted)
        if stop_wanted is None:
            self._drop()
            return
        self.stop_wanted = stop_wanted
        self._leave_out_missing(state, losses)
        last = None if grain is None or scalar is None else (grain, given)
        averaged = self._averager.finish(losses.parts, scalar, last)
        state.overflow = state.overflow or self._averager.overflowed
        if self._averager.intact:
            self._kept = self._keep(state, losses)
        if averaged is None:
            self._drop()
            return
        state.node_losses = losses.nodes
        state.weight = sum_in_order(each.weight for each in state.node_losses)
        state.loss_sum = sum_in_order(each.loss_sum for each in state.node_losses)
        if state.assigned.attests and self._processes.leads:
            self._attest(state)
        self._report(state, averaged)

    def _leave_out_missing(self, state: StepState, losses: GrainLosses) -> None:
        """Grains of the share that hold no sample are absent; one process of a host says so."""
        for each in losses.missing:
            losses.add(each, 0.0, None)
            if self._processes.leads:
                if state.assigned.attests:
                    self._note_samples(state, each, None, 0)
                self._averager.leave_out(each)

    def _attest(self, state: StepState) -> None:
        """Says what was computed; before the script can change what is in `p.grad`."""
        verification, assigned = self._averager.verification, state.assigned
        itemised = frozenset(assigned.verifies if assigned.itemised else ())
        if assigned.itemises_own:
            itemised |= frozenset(range(Grains(assigned.batch, self._grain).count))
        state.attested = verification.attested(itemised)
        hashes = verification.averages_hashes()
        state.averages_digest = digest_of(hashes)
        if (checks := self._averager.checks) is not None:
            state.mean_check = checks.mean_check
            state.apart = checks.apart(hashes, state.attested)

    def _keep(self, state: StepState, losses: GrainLosses) -> Kept:
        state.collect()
        return Kept(
            parent=state.assigned.parent,
            epoch=state.assigned.epoch,
            positions=state.assigned.positions,
            weight=0.0,
            loss_sum=0.0,
            correct=state.correct,
            doubts=state.doubts,
            overflow=state.overflow,
            grains=losses.known,
        )
