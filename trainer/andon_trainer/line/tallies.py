"""Tallies: what an evaluation adds up, batch by batch, with the same bits on any number of workers.

Theory of operation. A mean that is added up by workers depends on how the samples were divided. So
each batch is computed whole by one worker, which keeps its sums; once all batches are done the
workers tell each other, and everybody adds them up in the order of the batches. If a worker was
lost meanwhile, some batches are missing: those that are left divide these, until none is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

__all__ = ["Tallies"]

_ONE = ""
"""The name of a number that was given without one."""


class Tallies:
    """The sums of the batches of one evaluation."""

    def __init__(self) -> None:
        """No batch was computed."""
        self.present: int | None = None
        """The batch that the script has now."""
        self.complete = False
        """Whether all batches of the evaluation are here."""
        self._done: dict[int, tuple[float, dict[str, float]] | None] = {}

    def begin_batch(self, number: int) -> None:
        """The script gets a batch, of which it has said nothing yet."""
        self.present = number
        self._done[number] = None

    def add(
        self, value: float | torch.Tensor | Mapping[str, float | torch.Tensor], n: float
    ) -> None:
        """Sums over the present batch, and the number of terms in them.

        Raises:
            RuntimeError: the script has no batch, or has tallied it already.
            ValueError: the number is negative or not finite.
        """
        if self.present is None or self._done.get(self.present) is not None:
            raise RuntimeError(
                "line.tally is called once for each batch of line.split(loader), in its loop body"
            )
        if not 0 <= n < float("inf"):
            raise ValueError(f"n must be finite and at least 0, not {n}")
        named = value if isinstance(value, Mapping) else {_ONE: value}
        self._done[self.present] = n, {name: _number(each) for name, each in named.items()}

    def missing(self, count: int) -> list[int]:
        """The batches out of `count` that nobody has told of."""
        return [number for number in range(count) if number not in self._done]

    def packed(self) -> bytes:
        """What this worker has computed, exactly."""
        return json.dumps(list(self._done.items())).encode()

    def forget_own(self) -> None:
        """What this worker computes counts for nothing: it only learns."""
        self._done = {}

    def take(self, packed: bytes) -> None:
        """What a worker has computed."""
        for number, sums in json.loads(packed):
            self._done[number] = None if sums is None else (sums[0], sums[1])

    def differing(self, packed: bytes) -> list[int]:
        """The batches of which a worker has computed other sums than are here."""
        here = json.loads(self.packed())
        # As text: a sum that is not a number equals none.
        known = {number: json.dumps(sums) for number, sums in here if sums is not None}
        return [
            number
            for number, sums in json.loads(packed)
            if number in known and known[number] != json.dumps(sums)
        ]

    def end(self) -> None:
        """All batches are here."""
        self.present, self.complete = None, True

    def means(self) -> float | dict[str, float]:
        """Each sum over all batches, divided by the number of terms; nan if there are none.

        Raises:
            RuntimeError: the evaluation is not over, or lacks a tally.
            ValueError: batches were tallied under different names.
        """
        if not self.complete or None in self._done.values():
            raise RuntimeError(
                "line.tallied is for after a loop over line.split(loader), to its end, that calls "
                "line.tally for each batch on every worker"
            )
        terms, sums = 0.0, dict[str, float]()
        for number in sorted(self._done):
            n, named = self._done[number] or (0.0, {})
            if sums and named.keys() != sums.keys():
                raise ValueError("line.tally was given other names for one batch than for another")
            terms += n
            for name, value in named.items():
                sums[name] = sums.get(name, 0.0) + value
        means = {name: value / terms if terms else float("nan") for name, value in sums.items()}
        return means[_ONE] if means.keys() == {_ONE} else means or float("nan")


def _number(value: float | torch.Tensor) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
