"""Adding up: the gradients of a step's micro-batches accumulate in `p.grad`, as in plain PyTorch.

What leaves this process is one gradient then, or one local step is made by it. On a line of grains
nothing is added up in `p.grad` (see `grain_steps`).
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from andon_trainer.model.graph import Graph
from andon_trainer.schedules.loop_checks import no_batch_may_be_left_out
from andon_trainer.schedules.loop_steps import LoopSteps
from andon_trainer.schedules.processes import GradientProcesses
from andon_trainer.schedules.step_state import StepState

__all__ = ["AddsUp"]


class AddsUp(LoopSteps):
    """Steps whose micro-batches are added up before the last one's backward is over."""

    _processes: GradientProcesses

    @abstractmethod
    def _complete(self, state: StepState, scalar: torch.Tensor, *, whole: bool) -> None:
        """Runs a step's last backward, and leaves the mean in `p.grad`.

        `whole`: the only micro-batch's loss is a mean already.
        """

    def _go_backward(
        self,
        state: StepState,
        losses: tuple[torch.Tensor, torch.Tensor],
        given: float,
        graph: Graph,
    ) -> None:
        loss, reported = losses
        factor, state.waiting = state.make_room(given), 0
        # Before backward adds to it: what was held back has to have the same unit as what comes.
        self._accumulated.put_back(factor)
        value = self._averager.losses.begin(reported, gated=given > 0)
        # A loss that is still on its way from a GPU is looked at before anything moves; with a
        # weight of 0 it has to be known now.
        known = value.here or not (given or state.borrowed)
        finite = not known or math.isfinite(value.number())
        if given and not finite and not self._processes.refuses_later(state, value.number()):
            self._refuse_loss(state, value.number())
            return
        if not given and not finite and not state.borrowed:
            # For example the mean over no target. Its weight is 0, but 0 times its gradient would
            # be nan: so it does not go backward at all.
            if self._processes.waits_in_model:
                raise no_batch_may_be_left_out()
            if not state.last:
                self._averager.clock.done()
                state.micro_batches += 1
                self._accumulated.hold()
                return
            if state.weight:
                loss = self._accumulated.zero_loss()
        if given:
            state.add_loss(value, given)
        # The only micro-batch of its step is a mean already. Otherwise the sum of the products is
        # accumulated, each times its part of the share, and scaled to a mean when it is sent.
        alone = state.kept is None or state.borrowed
        whole = state.last and state.micro_batches == 0 and alone
        state.micro_batches += 1
        share = given / state.unit if given else 0.0
        scalar = loss.reshape(()) if whole else loss.reshape(()) * share
        scalar = graph.goes_back(scalar, self._accumulated)
        self._in_backward = True
        try:
            if state.last:
                self._complete(state, scalar, whole=whole)
                self._loss_check.collect()  # All numbers of the step are here.
            else:
                scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
                self._averager.clock.done()
                self._accumulated.hold()
        finally:
            self._in_backward = False
