"""Gathering within a step: the bytes that each rank gives, on every rank, before gradients travel.

Theory of operation. A script that compares samples with each other needs the features of all
workers between forward and backward. Its gather is some exchanges of the step's own round, so a
lost worker makes them void together with the gradients, and the step is tried again.

The protocol has no exchange for bytes of several ranks. So two bytes travel as one number: 0 to
65535, a float32 that is exact. All ranks' bytes lie one after another, and each rank sends zeros in
place of the others'. What comes back is the mean, so times the number of ranks it is what each has
sent, once it is rounded. The numbers lie in blocks of the layout, as running statistics do.

There are three exchanges, or more if the blocks have too little room. A broadcast of rank 0's comes
first: a rank whose script gathers elsewhere, or not at all, makes another exchange in its place, so
the line stops before a gradient is averaged with what is none. Then come the lengths and the
weights, and then the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.block_numbers import BlockNumbers, rooms_for
from andon_trainer.averaging.broadcast import HEAD_BYTES, pack
from andon_trainer.core.calls import Call

__all__ = ["Given", "OwnRows", "Rows", "StepGather"]

_NAME = "line.gather"
_MOST_EXCHANGES = 2000
"""Of one gather; a reducer takes 4096 in a round."""
_HEAD = struct.Struct("<II")
"""Length and weight."""

_Digits = npt.NDArray[np.uint16]


class OwnRows(torch.autograd.Function):
    """This worker's rows among those of all: the identity, with a factor for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: float) -> torch.Tensor:
        """The rows as they are."""
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Their gradient, times the factor."""
        return gradients[0] * ctx.factor, None


@dataclass(frozen=True, slots=True)
class Given:
    """What one rank gave."""

    data: bytes
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What all workers gave in a loop body."""

    given: Sequence[bytes]
    """By rank; empty of a rank that has no samples."""
    rank: int
    """This worker's."""
    factor: float
    """What makes this worker's gradient, in the mean by samples, a part of the sum; 0: it has no
    samples."""


class StepGather:
    """The gathers of a round. Used by one thread."""

    def __init__(self, averaging: Averaging) -> None:
        """`averaging` is that of the gradients, which follow."""
        self._averaging = averaging
        self._numbers = BlockNumbers(averaging)

    def run(self, given: Given) -> list[Given] | None:
        """What all ranks give, by rank; None if the round is void.

        Raises:
            ValueError: the model's blocks are too small for so many bytes.
            LineHalted: the line stopped, and this worker raises.
        """
        assigned = self._averaging.member.position.assigned
        assert assigned is not None
        data = pack(_NAME, {}, filled=True)
        call = Call(name=_NAME, data=data, head_bytes=HEAD_BYTES)
        # First, before any number is averaged: here a rank that makes another exchange is found.
        if not self._averaging.broadcast(call, last=False):
            return None
        head, ranks = _HEAD.pack(len(given.data), given.weight), assigned.world_size
        # Lengths before bytes: each rank lays its bytes where those of the ranks before it end.
        heads = self._share(head, [_HEAD.size] * ranks, assigned.rank)
        if heads is None:
            return None
        lengths, weights = zip(*map(_HEAD.unpack, heads), strict=True)
        found = self._share(given.data, lengths, assigned.rank)
        if found is None:
            return None
        return [Given(*each) for each in zip(found, weights, strict=True)]

    def _share(self, mine: bytes, lengths: Sequence[int], rank: int) -> list[bytes] | None:
        """The bytes of all ranks, whose `lengths` are known."""
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + -(-length // 2))
        whole = np.zeros(ends[-1], np.float32)
        if rank < len(lengths):  # A worker that only attends gives nothing.
            whole[ends[rank] : ends[rank + 1]] = np.frombuffer(
                mine + b"\0" * (len(mine) % 2), "<u2"
            )
        digits = self._sum(whole, len(lengths))
        if digits is None:
            return None
        return [
            digits[start:stop].tobytes()[:length]
            for (start, stop), length in zip(pairwise(ends), lengths, strict=True)
        ]

    def _sum(self, whole: npt.NDArray[np.float32], ranks: int) -> _Digits | None:
        """The sum of what all ranks have in `whole`, where all but one have zeros."""
        sizes = self._numbers.sizes
        room = sum(sizes)
        # All ranks know all lengths, so each of them finds this, and none waits for the others.
        if whole.size > room * _MOST_EXCHANGES:
            raise ValueError(
                f"all workers together gather {2 * whole.size} bytes in one step, and a model of "
                f"{room} weights carries at most {2 * room * _MOST_EXCHANGES}: gather less"
            )
        mean, at = np.empty_like(whole), 0
        for blocks in rooms_for(sizes, whole.size):
            # Exact: the encoding of gradients may round, and its residuals are not these numbers'.
            call = Call(name=_NAME, blocks=blocks, exact=True)
            if not self._numbers.share(call, 1.0, whole[at:], mean[at:]):
                return None
            at += sum(sizes[blocks.start : blocks.stop])
        # Each has lost a few units in the last of 24 binary places, and needs 16 of them.
        return np.rint(mean.astype(np.float64) * ranks).astype("<u2")
