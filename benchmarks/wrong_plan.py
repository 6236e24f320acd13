"""What `wrong_arithmetic.py` does wrong, and when: finite faults, and the flipping of bits.

A fault is one bit of one float32 number, of its mantissa or of its exponent, such that the number
stays finite. It happens once, or again and again while its step is tried.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = [
    "CLEAN",
    "GRAINS",
    "MICRO",
    "PLACES",
    "REDUCER",
    "Fault",
    "flip",
    "plan_of",
    "read_plan",
    "write_plan",
]

GRAINS, MICRO = 8, 2
"""Of a batch, and samples of a grain."""
CLEAN = 2
"""Steps before the first fault, and after the last one."""
PLACES = ("forward", "backward", "addition", "sending", "write-back", "optimizer")
"""Where a worker computes wrong."""
REDUCER = "reducer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a worker, in one step."""

    step: int
    slot: int
    """The worker's."""
    place: str
    exponent: bool
    """Whether the bit is one of the exponent."""
    often: bool
    """Whether it happens at about every third chance while the step is tried; else once."""
    seed: int


def plan_of(count: int, workers: int, seed: int) -> list[Fault]:
    """`count` faults, in every second step: what is clean between them shows false alarms."""
    draw = random.Random(f"{seed} {workers}")
    return [
        Fault(
            step=CLEAN + 1 + 2 * number,
            slot=draw.randrange(workers),
            place=PLACES[number % len(PLACES)],
            exponent=draw.random() < 0.5,
            often=draw.random() < 0.5,
            seed=draw.randrange(2**32),
        )
        for number in range(count)
    ]


def write_plan(faults: Iterable[Fault], file: Path) -> None:
    """Writes a plan."""
    file.write_text(json.dumps([asdict(each) for each in faults]))


def read_plan(file: Path) -> list[Fault]:
    """Reads it."""
    return [Fault(**each) for each in json.loads(file.read_text())]


def flip(numbers: npt.NDArray[np.float32], draw: random.Random, *, exponent: bool) -> None:
    """Flips a bit of one number, in place, so that it stays finite.

    Args:
        numbers: shape (elements,), at least one.
        draw: chooses the number and the bit.
        exponent: whether the bit is one of the exponent.
    """
    places = draw.sample(range(numbers.size), numbers.size)
    for place, bit in _choices(places, draw, exponent=exponent):
        before = numbers[place]
        numbers.view(np.uint32)[place] ^= np.uint32(1 << bit)
        if np.isfinite(numbers[place]):
            return
        numbers[place] = before
    raise AssertionError("no bit leaves any of these numbers finite")


def _choices(
    places: Iterable[int], draw: random.Random, *, exponent: bool
) -> Iterator[tuple[int, int]]:
    bits = list(range(23, 31) if exponent else range(23))
    for place in places:
        for bit in draw.sample(bits, len(bits)):
            yield place, bit
