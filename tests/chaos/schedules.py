"""The schedules under test: the service's flags for each, and what a judge may expect of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = [
    "EVERY_STEP",
    "LONGEST_CADENCE",
    "SCHEDULES",
    "WITH_QUORUM",
    "LineSchedule",
    "Outer",
    "dealt",
    "parts_of",
]

Positions = list[int]


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer optimizer: SGD, with Nesterov's momentum unless that is 0."""

    rate: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LineSchedule:
    """How a line divides work, and what lies between two exchanges."""

    name: str
    flags: tuple[str, ...] = ()
    """Of the service."""
    cadence: bool = False
    local_steps: int = 0
    """Of LOCAL; 0: gradients are averaged in every round."""
    outer: Outer = Outer()
    overlap: bool = False
    fragments: int = 1
    """In how many groups of blocks the model is exchanged; 1: whole."""
    mix: float = 0.0
    """How much of its own weights a worker keeps where a fragment's average arrives."""
    ring: bool = False
    """Whether workers exchange along a ring, whose mean adds up in another order."""
    balanced: bool = False
    interleaved: bool = False
    linear_rate: bool = False
    """Whether the learning rate grows with the window."""
    quorum: bool = False
    """Whether a window may go on without workers that are late."""

    @property
    def even(self) -> bool:
        """Whether shares depend only on the roster."""
        return not (self.cadence or self.balanced)

    def rate_scale(self, batch: int, global_batch: int) -> float:
        """What the learning rate of a step of `batch` positions is multiplied with."""
        return max(1.0, batch / global_batch) if self.linear_rate else 1.0


EVERY_STEP = LineSchedule(name="every-step")
_NESTEROV = Outer(rate=0.7, momentum=0.9)
_LOCAL = ("--schedule", "local", "--local-steps", "4")
LONGEST_CADENCE = 3
"""Batches in a window of a cadence at most."""
_CADENCE = ("--schedule", "cadence", "--max-anchor", str(LONGEST_CADENCE), "--growth-cost", "1")

SCHEDULES = (
    EVERY_STEP,
    LineSchedule(name="balanced", flags=("--shares", "balanced"), balanced=True),
    LineSchedule(
        name="balanced-interleaved",
        flags=("--shares", "balanced-interleaved"),
        balanced=True,
        interleaved=True,
    ),
    LineSchedule(name="cadence", flags=_CADENCE, cadence=True),
    LineSchedule(
        name="cadence-linear",
        flags=(*_CADENCE, "--lr-scaling", "linear", "--shares", "interleaved"),
        cadence=True,
        interleaved=True,
        linear_rate=True,
    ),
    LineSchedule(name="local", flags=_LOCAL, local_steps=4),
    LineSchedule(
        name="local-nesterov",
        flags=(*_LOCAL, "--outer", "nesterov", "--shares", "balanced"),
        local_steps=4,
        outer=_NESTEROV,
        balanced=True,
    ),
    LineSchedule(
        name="overlapped",
        flags=(*_LOCAL, "--outer", "nesterov", "--overlap"),
        local_steps=4,
        outer=_NESTEROV,
        overlap=True,
    ),
    LineSchedule(
        name="fragments",
        flags=(*_LOCAL, "--outer", "nesterov", "--fragments", "2", "--shares", "balanced"),
        local_steps=4,
        outer=_NESTEROV,
        fragments=2,
        balanced=True,
    ),
    LineSchedule(
        name="fragments-overlapped",
        flags=(
            *(*_LOCAL, "--overlap", "--fragments", "4", "--mix", "0.5"),
            *("--shares", "balanced-interleaved"),
        ),
        local_steps=4,
        overlap=True,
        fragments=4,
        mix=0.5,
        balanced=True,
        interleaved=True,
    ),
    LineSchedule(
        name="overlapped-ring",
        flags=(
            *(*_LOCAL, "--outer", "nesterov", "--overlap", "--overlap-steps", "1", "--mix", "0.5"),
            *("--topology", "ring"),
        ),
        local_steps=4,
        mix=0.5,
        outer=_NESTEROV,
        overlap=True,
        ring=True,
    ),
)
"""Every schedule that waits for everybody; the storms go through all of them."""

WITH_QUORUM = (
    LineSchedule(
        name="quorum",
        flags=(*_LOCAL, "--quorum", "0.6", "--grace", "0.02", "--shares", "balanced"),
        local_steps=4,
        balanced=True,
        quorum=True,
    ),
    LineSchedule(
        name="async",
        flags=("--schedule", "async", "--local-steps", "4", "--outer", "nesterov"),
        local_steps=4,
        outer=_NESTEROV,
        quorum=True,
    ),
)
"""Those on which a worker may be late."""


def dealt(batch: range, targets: Sequence[int], *, interleaved: bool) -> list[Positions]:
    """Each rank's positions at a step's first attempt: Webster's method, one at a time.

    An independent implementation of the rule in docs/protocol-servers.md.
    """
    shares: list[Positions] = [[] for _ in targets]
    for position in batch:
        rank = min(
            range(len(targets)),
            key=lambda rank: (
                bool(shares[rank]),
                Fraction(2 * len(shares[rank]) + 1, targets[rank]),
                rank,
            ),
        )
        shares[rank].append(position)
    if interleaved:
        return shares
    starts = [sum(map(len, shares[:rank])) for rank in range(len(targets))]
    return [
        list(batch[start : start + len(share)]) for start, share in zip(starts, shares, strict=True)
    ]


def parts_of(positions: Positions, most: int) -> list[Positions]:
    """Positions in as few runs of at most `most` as possible, whose sizes differ by at most one.

    The first runs are the longer ones. These are a worker's local steps.
    """
    count = math.ceil(len(positions) / most)
    sizes = [len(positions) // count + (i < len(positions) % count) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [positions[end - size : end] for end, size in zip(ends, sizes, strict=True)]
