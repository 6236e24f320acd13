"""Accumulation: the means of several committed batches make one step of the optimizers.

Theory of operation. With `line.accumulate(k)` each batch of the loader is a step of the line as
ever: exchanged, committed, in the journal. What differs is what happens to its mean. It is added
up, times its total weight, and only the k-th batch, or the last of an epoch, moves the weights.

    between           p.grad is None after backward; the mean waits for its commit, then is added
    the last one      p.grad is the mean over all of them, for clipping; the commit moves weights

A mean that waits is in nobody's sum: if its round is void, it is dropped, and the sum is what it
was. Every worker adds the same bits in the same order, so the sum is the same everywhere. It goes
into checkpoints and to newcomers, as the optimizers' states do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.state.replica import Replica

__all__ = ["ACCUMULATION", "Accumulation"]

ACCUMULATION = "andon.accumulation"
"""The name of the sum in checkpoints."""

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Batch:
    """The mean of a batch that is not committed yet."""

    weight: float
    """The sum of all workers' weights."""
    ends: bool
    """Whether the weights move with it."""
    means: dict[str, torch.Tensor]
    """By parameter; empty if they are in `p.grad`."""


class Accumulation:
    """The sum of the means of one accumulation. Used by one thread."""

    def __init__(self, gradients: AccumulatedGradients, replica: Replica) -> None:
        """Nothing is accumulated yet."""
        self._gradients = gradients
        self._replica = replica
        self._every: int | None = None
        """The k of the `line.accumulate(k)` that the script is in; None: it is in none."""
        self._began_with = 0
        """The k of the accumulation that was begun."""
        self._batches = 0
        """Committed batches that are in the sum."""
        self._weight = 0.0
        self._sums: dict[str, torch.Tensor] = {}
        self._waiting: _Batch | None = None
        self._total = 0.0
        """The total weight of the accumulation that the last commit ended; 0 if it ended none."""
        self._overflow = False
        """Whether a batch in the sum overflowed, so that the sum is none."""
        self.overflowed = False
        """Whether one did in the accumulation that the last commit ended."""

    @property
    def is_open(self) -> bool:
        """Whether batches were committed whose gradients have not moved the weights yet."""
        return self._batches > 0

    @property
    def batches(self) -> int:
        """How many they are."""
        return self._batches

    @property
    def has_mean(self) -> bool:
        """Whether the last commit ended an accumulation that had any weight."""
        return self._total > 0

    @contextmanager
    def of(self, every: int) -> Iterator[None]:
        """Around loop bodies: every `every`-th batch moves the weights.

        Raises:
            ValueError: `every` is below 1.
            RuntimeError: an accumulation of another number of batches was begun.
        """
        if every < 1:
            raise ValueError(f"line.accumulate takes a number of batches from 1 on, not {every}")
        if self._every is not None:
            raise RuntimeError("line.accumulate was called inside line.accumulate: call it once")
        if ACCUMULATION not in self._replica.registered:
            # Not before a script accumulates: its checkpoints would need to have a sum.
            self._replica.register(ACCUMULATION, self)
        if self.is_open and every != self._began_with:
            raise RuntimeError(
                f"line.accumulate({every}) was called after {self._batches} of "
                f"{self._began_with} batches: change the number only where line.committed is true"
            )
        self._every = every
        try:
            yield
        finally:
            self._every = None

    def refuse_other_bodies(self) -> None:
        """Raises RuntimeError if an accumulation was begun, and this loop body is not in it."""
        arrived = self._replica.early(ACCUMULATION)
        if self._every is None and (self.is_open or (arrived and arrived["batches"])):
            raise RuntimeError(
                "a batch goes backward outside line.accumulate, and an accumulation is under way: "
                "write `with line.accumulate(k):` around every loop body"
            )

    def take(self, weight: float, *, ends_epoch: bool) -> None:
        """Takes the mean out of `p.grad`; leaves that of the whole accumulation at its end.

        Args:
            weight: the sum of all workers' weights, of this batch.
            ends_epoch: whether no batch follows in this epoch.
        """
        if self._every is None:
            self._waiting = None
            return
        ends = ends_epoch or self._batches + 1 >= self._every
        means: dict[str, torch.Tensor] = {}
        if ends:
            self._complete(weight)
        else:
            for name, parameter in self._gradients.named():
                if parameter.grad is not None:
                    # Out of `p.grad`, so that the next backward does not add to it.
                    means[name] = _wide(parameter.grad)
                    parameter.grad = None
        # In no sum before the commit: a void round drops it, and all is as it was.
        self._waiting = _Batch(weight, ends, means)

    def drop(self) -> None:
        """Forgets the mean that waits: its round is void."""
        self._waiting = None

    def committed(self, *, overflow: bool) -> None:
        """The batch is committed: its mean is in the sum, or the sum in the weights.

        Args:
            overflow: whether its scaled gradients overflowed; the scale stays as it is until the
                accumulation ends, and no weight moves then.
        """
        batch, self._waiting = self._waiting, None
        self._total, self.overflowed = 0.0, False
        if batch is None:
            return
        self._overflow = self._overflow or overflow
        if batch.ends:
            self.overflowed, self._overflow = self._overflow, False
            self._total = self._weight + batch.weight
            self._batches, self._weight = 0, 0.0
            # Only now: after a void round the same sums are needed again.
            self._sums.clear()
            return
        assert self._every is not None
        self._began_with = self._every
        self._batches += 1
        self._weight += batch.weight
        with torch.no_grad():
            for name, mean in batch.means.items():
                # A product and a sum, each rounded, with a factor that is a float32: a fused one,
                # or a quotient, would be rounded otherwise on a GPU.
                mean.mul_(_float32(batch.weight))
                if name in self._sums:
                    self._sums[name].add_(mean)
                else:
                    self._sums[name] = mean

    def _complete(self, weight: float) -> None:
        """Makes `p.grad` the mean over all batches; the sums stay as they are until the commit."""
        total = self._weight + weight
        if not self._batches or not total:
            return  # It is that mean already.
        with torch.no_grad():
            for name, parameter in self._gradients.named():
                parts = self._sums.get(name)
                if parameter.grad is not None:
                    # A new tensor, which may be added to in place. The sums must stay as they are:
                    # the round may be void.
                    own = parameter.grad.to(_dtype_of(parameter.grad)) * _float32(weight)
                    parts = own if parts is None else own.add_(parts)
                if parts is not None:
                    parameter.grad = (parts * _float32(1.0 / total)).to(parameter.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The sum, with how many batches are in it."""
        return {
            "every": self._began_with,
            "batches": self._batches,
            "weight": self._weight,
            "overflow": self._overflow,
            "sums": dict(self._sums),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the sum of a checkpoint, or of another worker."""
        self._began_with, self._batches = state["every"], state["batches"]
        self._weight, self._overflow = state["weight"], state["overflow"]
        self._waiting = None
        places = dict(self._gradients.named())
        self._sums = {
            name: part.detach().clone().to(places[name].device)
            for name, part in state["sums"].items()
        }


def _dtype_of(gradient: torch.Tensor) -> torch.dtype:
    """The dtype of sums: half precision would lose most of what is added."""
    return torch.float32 if gradient.dtype in _SIXTEEN_BITS else gradient.dtype


def _float32(number: float) -> float:
    return float(np.float32(number))


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().to(_dtype_of(gradient))
