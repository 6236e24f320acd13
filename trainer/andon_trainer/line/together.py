"""Calls of `Line` that all workers make together between steps: evaluation and its mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import splitmix64
from andon_trainer.data.evaluation import Coverage
from andon_trainer.line.properties import LineProperties
from andon_trainer.state.best import BEST, BestSoFar

__all__ = ["Together"]


_RANKS_AT_ONCE = 40
"""How many bits a float64 passes exactly through a mean of up to 4096 workers."""


class Together(LineProperties):
    """What `Line` offers between two steps."""

    _coverage: Coverage
    _best: BestSoFar | None = None

    def split(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yields this worker's share of a loader's samples; all shares together hold each once.

        Use it for evaluation, and combine the results with `line.mean`. Samples come in the order
        of the dataset or of the loader's own sampler. Batches of a batch sampler or of an
        `IterableDataset` are not divided: each goes to one worker, and every worker reads the
        whole stream. If a worker is lost, so is its share; `line.covered` tells. Before its first
        step a worker gets all samples.

        ```python
        for x, y in line.split(val_loader):
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            n += len(y)
        val_loss = line.mean(total / max(n, 1), weight=n)
        ```

        Args:
            loader: with whatever sampler, `collate_fn` and loading processes it has; processes
                stay between evaluations if it says `persistent_workers=True`. Its batches are
                moved to `line.device`.
        """
        self._member.show("EVALUATING")
        # Until its first round a worker does not know who evaluates beside it: at the start the
        # others may still wait for their weights. Every worker then evaluates everything, and
        # the mean of the same number is that number.
        assigned = self._member.assigned
        if assigned is None:
            place = self._coverage.place(0, 1, None)
        else:
            place = self._coverage.place(self.rank, self.world_size, assigned.key)
        seed = splitmix64(self.seed) ^ self.step
        units, batches = self._splitting.split(loader, place, seed=seed)
        self._coverage.divided(units)
        return batches

    @property
    def covered(self) -> bool:
        """Whether the last `line.mean` covered every sample of the `line.split` before it.

        It is False, on every worker, if one was lost in between. Evaluate again, and those that
        are left divide all samples.
        """
        return self._coverage.complete

    @overload
    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float: ...

    @overload
    def mean(
        self, value: Mapping[str, float | torch.Tensor], weight: float = 1.0
    ) -> dict[str, float]: ...

    def mean(
        self,
        value: float | torch.Tensor | Mapping[str, float | torch.Tensor],
        weight: float = 1.0,
    ) -> float | dict[str, float]:
        """Returns the weighted mean of all workers' values: the same number on every worker.

        Every worker must call it, between two steps.

        ```python
        val = line.mean({"loss": total / n, "accuracy": right / n}, weight=n)
        ```

        Args:
            value: a number or a tensor with one element; or several of them by name, the same
                names on every worker.
            weight: this worker's weight in the mean, such as its number of samples.

        Returns:
            The mean, computed in float64; nan if all weights are 0. Of several numbers the means
            by name.

        Raises:
            ValueError: the weight is negative or not finite, or the workers' names differ.
            RuntimeError: a step is under way; its workers wait for gradients, not for this.
            LineHalted: the line stopped.
        """
        if not (weight >= 0 and weight < float("inf")):
            raise ValueError(f"weight must be finite and at least 0, not {weight}")
        self._require_between_steps("mean")
        if not isinstance(value, Mapping):
            return self._mean(float(value), float(weight))
        numbers = {name: float(value[name]) for name in sorted(value)}
        names = hashlib.sha256("\n".join(numbers).encode()).digest()
        # 40 bits: the mean of equal numbers of that size is exact, whatever the number of workers.
        digest = float(int.from_bytes(names[:5]))
        if self._mean(digest, 1.0) != digest:
            raise ValueError(
                f"this worker gave line.mean {', '.join(numbers) or 'nothing'}, and another worker "
                "other names: give the same ones on every worker, also where there is no sample"
            )
        means = {name: self._mean(number, float(weight)) for name, number in numbers.items()}
        return {name: means[name] for name in value}

    def best(
        self, value: float, mode: Literal["min", "max"] = "min", patience: int | None = None
    ) -> bool:
        """Returns whether an evaluation is the best so far: the same on every worker.

        Every worker must call it, between two steps, once for each evaluation. The best value is
        in checkpoints and goes to new workers. If the run has a folder, the checkpoint of the best
        step is written and kept, and `checkpoints/best` leads to it.

        ```python
        if line.best(val_loss, patience=3) and line.is_main:
            print("best so far:", val_loss)
        ```

        Args:
            value: what `line.mean` returned; nan is never the best.
            mode: whether the smallest or the greatest value is the best.
            patience: calls `line.stop` after so many evaluations without a better one; None: never.

        Raises:
            ValueError: the mode is neither `min` nor `max`.
            RuntimeError: a step is under way.
            LineHalted: the line stopped.
        """
        self._require_between_steps("best")
        if self._best is None:
            self._best = BestSoFar()
            self._worker.replica.register(BEST, self._best)
        # What decides must be one number, even if a script passes its own worker's.
        is_best = self._best.take(self._mean(float(value), 1.0), mode, self.step)
        if is_best:
            self._worker.checkpoints.keep_best(self.step)
        elif patience is not None and self._best.since >= patience:
            self._want_stop(f"{self._best.since} evaluations without a better one")
        return is_best

    def _mean(self, value: float, weight: float) -> float:
        mean, _, contributors = self._member.scalar_all_reduce(value, weight)
        if self._coverage.lacks(contributors):
            # The answer is the same on every worker that is left, so all of them ask.
            assigned = self._member.assigned
            self._coverage.lost(self._ranks_left(), assigned.key if assigned else None)
        return mean

    def _ranks_left(self) -> list[int]:
        """The ranks that still take part: each says so by a bit of a sum."""
        left = []
        for first in range(0, self.world_size, _RANKS_AT_ONCE):
            place = self.rank - first
            bit = float(1 << place) if 0 <= place < _RANKS_AT_ONCE else 0.0
            mean, workers, _ = self._member.scalar_all_reduce(bit, 1.0)
            bits = round(mean * workers)
            left += [first + each for each in range(_RANKS_AT_ONCE) if bits >> each & 1]
        return left

    def _require_between_steps(self, what: str) -> None:
        steps = self._manual or self._stepper
        if steps is not None and steps.midway:
            raise RuntimeError(
                f"step {self.step + 1} is under way, and line.{what} is taken between two steps: "
                "call it once line.committed is true, or outside the loop"
            )

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
