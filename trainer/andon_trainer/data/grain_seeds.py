"""Seeds of grains: what a forward draws depends on its grain, and not on who computes it.

Theory of operation. On a line of equal bits the generators are seeded before each loop body, by the
run's seed, the epoch and the first position of the body's grain: so dropout's masks are the same
whoever computes the grain, and whatever this process drew before. Between two steps they are seeded
by the committed step, and when an epoch begins by that, too: what a script draws next, such as its
mixing of batches or a choice of validation samples, is the same on all workers, and on one that
joined just now.
"""

from __future__ import annotations

import torch

from andon.protocol.order import mixed
from andon_trainer.data.randomness import seed_generators

__all__ = ["GrainSeeds"]

_GRAIN, _BETWEEN, _EPOCH, _EVALUATION = 0x677261696E, 0x6265747765656E, 0x65706F6368, 0x6576616C
"""Each kind has numbers of its own."""


class GrainSeeds:
    """Seeds this process's generators: Python's, NumPy's, and torch's on all devices."""

    def __init__(self, seed: int) -> None:
        """`seed` is the run's."""
        self._seed = seed

    def grain(self, epoch: int, start: int) -> None:
        """The forward of the grain that begins at position `start` follows."""
        self._begin(_GRAIN, epoch, start)

    def between(self, step: int) -> None:
        """What the script draws after `step` committed steps follows."""
        self._begin(_BETWEEN, step)

    def epoch(self, epoch: int, step: int) -> None:
        """What the script draws as an epoch begins, after `step` committed steps, follows."""
        self._begin(_EPOCH, epoch, step)

    def evaluation(self, step: int, batch: int) -> None:
        """The forward of a batch of an evaluation, after `step` committed steps, follows."""
        self._begin(_EVALUATION, step, batch)

    def _begin(self, *what: int) -> None:
        seed = mixed(self._seed, *what)
        seed_generators(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
            torch.cuda.manual_seed_all(seed)
        elif torch.backends.mps.is_available():
            torch.mps.manual_seed(seed)
