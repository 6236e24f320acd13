"""Calls of `Line` that all workers make together between steps: evaluation and its mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.data.evaluation import SplitCheck, split_loader
from andon_trainer.line.properties import LineProperties

__all__ = ["Together"]


class Together(LineProperties):
    """What `Line` offers between two steps."""

    _split_check: SplitCheck

    def split(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yields this worker's share of a loader's samples; all shares together hold each once.

        Use it for evaluation, and combine the results with `line.mean`. Samples come in the order
        of the dataset or of the loader's own sampler. If a worker is lost, so is its share;
        `line.mean` then logs a warning. Before its first step a worker gets all samples.

        ```python
        for x, y in line.split(val_loader):
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            n += len(y)
        val_loss = line.mean(total / max(n, 1), weight=n)
        ```

        Args:
            loader: over a map-style dataset; its batches are moved to `line.device`.

        Raises:
            TypeError: the dataset has no length and no indices.
        """
        self._member.show("EVALUATING")
        # Until its first round a worker does not know who evaluates beside it: at the start the
        # others may still wait for their weights. Every worker then evaluates everything, and
        # the mean of the same number is that number.
        alone = self._member.assigned is None
        rank, workers = (0, 1) if alone else (self.rank, self.world_size)
        self._split_check.split(workers)
        seed = splitmix64(self.seed) ^ self.step
        return split_loader(loader, rank, workers, self.device, seed=seed)

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Returns the weighted mean of all workers' values: the same number on every worker.

        Every worker must call it, between two steps.

        Args:
            value: a number or a tensor with one element.
            weight: this worker's weight in the mean, such as its number of samples.

        Returns:
            The mean, computed in float64; nan if all weights are 0.

        Raises:
            ValueError: the weight is negative or not finite.
            RuntimeError: a step is under way; its workers wait for gradients, not for this.
            LineHalted: the line stopped.
        """
        if not (weight >= 0 and weight < float("inf")):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        steps = self._manual or self._stepper
        if steps is not None and steps.midway:
            raise RuntimeError(
                f"step {self.step + 1} is under way, and line.mean is taken between two steps: "
                "call it once line.committed is true, or outside the loop"
            )
        mean, _, contributors = self._member.scalar_all_reduce(float(value), float(weight))
        self._split_check.check(contributors)
        return mean

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows in `andon status` what this worker does while the others wait for it.

        A worker is never dropped for being slow; this only tells people why.

        ```python
        with line.busy("upload"):
            upload(model)
        ```

        Args:
            what: a few words.
        """
        self._member.show("BUSY", what)
        try:
            yield
        finally:
            self._member.show("IDLE")
