"""The footprint of a step: whether its loop bodies drew random numbers, or moved statistics.

Without equal bits either depends on which worker computes which samples. So who recomputes such a
step alone can't expect anything near the line's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from andon_trainer.state import rng

__all__ = ["Footprint"]


class Footprint:
    """What a process's random generators and a model's buffers were at one moment."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Now."""
        self._modules = modules
        self._device = device
        self._generators = rng.digests(rng.capture(device))
        self._buffers = self._versions()

    def since(self) -> str:
        """What has happened since, in words that follow `its loop body`; empty: nothing."""
        if self._generators != rng.digests(rng.capture(self._device)):
            return "draws random numbers, as dropout does"
        if self._buffers != self._versions():
            return "changes buffers, as BatchNorm does"
        return ""

    def _versions(self) -> list[tuple[int, int]]:
        buffers = (buffer for module in self._modules for buffer in module.buffers())
        return [(id(buffer), buffer._version) for buffer in buffers]
