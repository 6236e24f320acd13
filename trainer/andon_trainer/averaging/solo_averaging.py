"""Averaging alone: what a line of one worker would make of its gradients."""

from __future__ import annotations

import time

import torch

from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.broadcast import NormBuffers
from andon_trainer.averaging.compute_clock import ComputeClock, HostStopwatch
from andon_trainer.averaging.copied_buffers import script_buffers
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.averaging.readings import Reader
from andon_trainer.averaging.solo_gate import SoloGate
from andon_trainer.core.reports import Timings
from andon_trainer.place.member import RunMember

__all__ = ["SoloAverager"]


class SoloAverager(SoloGate):
    """One worker's mean is its own gradient; values are checked as on a line."""

    intact = None
    """Never: no step of a line of one is void."""

    def __init__(
        self, member: RunMember, models: TrainedModels, reader: Reader | None = None
    ) -> None:
        """Puts hooks on the parameters; a step that halted leaves the models' buffers as they were.

        See `SoloGate` for the arguments.
        """
        super().__init__(member, models, reader)
        # The host's time on a GPU, too: nobody deals samples by it, and events would be waited for.
        self.clock = ComputeClock(HostStopwatch(), member.timeline)
        modules = models.modules
        self._held = [Held(NormBuffers(modules)), Held(script_buffers(modules))]

    def begin(self, *, kept: bool) -> None:
        """A step begins."""
        self.losses.clear()
        for each in self._held:
            each.begin()

    def put_away(self) -> None:
        """Sets the buffers back, if the step halted or was left."""
        for each in self._held:
            each.put_away()

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward, scales and checks; no line limits anything."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()
        self.overflowed = False
        self.settle(self._blocks, weight, scale)
        # After the check: from here on a gradient that is added is too late, as on a line.
        self.late.averaged(self._blocks)
        return Averaged(weight, 1, Timings(), computed_at=time.perf_counter())

    def committed(self, *, overflow: bool = False) -> None:
        """The buffers are as the step left them: this worker's are rank 0's."""
        for each in self._held:
            each.close()
