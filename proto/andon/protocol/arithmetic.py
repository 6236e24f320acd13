"""Arithmetic: what decides the bits of a worker's results, as names and values that it states.

docs/protocol-same-bits.md, section 36. Two workers have one arithmetic if they state the same; who
states nothing has one of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from itertools import pairwise

from andon.protocol.limits import MAX_TEXT_BYTES, require_at_most

__all__ = [
    "MAX_ITEMS",
    "Arithmetic",
    "ArithmeticRule",
    "check",
    "difference",
    "in_order",
    "is_one",
    "remedy",
]

MAX_ITEMS = 256
"""The most things that a worker states."""

Arithmetic = tuple[tuple[str, str], ...]
"""Name and value, in rising order of names; empty if nothing is stated."""

_UNSET = "unset"
"""What people read in place of a value that one side does not state."""


ENVIRONMENT = {"MKL_CBWR": "AVX2,STRICT", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that libraries read when they first compute; what a user has set stays."""


class ArithmeticRule(enum.Enum):
    """What a line does with a worker of another arithmetic than its own."""

    REQUIRE = "require"
    """It is refused."""
    TELL = "tell"
    """It is admitted, and people are told."""


def in_order(items: Mapping[str, str]) -> Arithmetic:
    """What a mapping states."""
    return tuple(sorted(items.items()))


def is_one(*stated: Arithmetic) -> bool:
    """Whether all of these are one arithmetic; an empty one equals nobody's, itself included."""
    return all(stated) and len(set(stated)) <= 1


def difference(mine: Arithmetic, theirs: Arithmetic) -> tuple[str, str, str] | None:
    """The first name whose values differ, and both values; None if none does."""
    here, there = dict(mine), dict(theirs)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            return name, here.get(name, _UNSET), there.get(name, _UNSET)
    return None


def remedy(name: str, wanted: str) -> str:
    """What gives a worker the line's value of a name, as an imperative."""
    if name.isupper():  # A variable of the environment.
        if wanted == _UNSET:
            return f"take {name} out of its environment"
        return f"start it with {name}={wanted}"
    if wanted == _UNSET:
        return "use one version of Andon"
    if name == "threads":
        return f"start it with OMP_NUM_THREADS={wanted}"
    if name in ("python", "torch", "numpy", "cuda", "cudnn"):
        return f"give it {name} {wanted}"
    if name.startswith(("processor", "gpu")):
        return "start it on a machine like the others'"
    return f"give it the line's {name}"


def check(items: Arithmetic) -> None:
    """Refuses what no worker may state.

    Raises:
        ValueError: names do not rise, or something is too large.
    """
    require_at_most(len(items), MAX_ITEMS, "things stated of the arithmetic")
    for name, value in items:
        if not name or not (name + value).isprintable():
            raise ValueError(f"{name!r} can't be stated of an arithmetic")
        require_at_most(
            len(name.encode()) + len(value.encode()), MAX_TEXT_BYTES, "bytes of a value"
        )
    names = [name for name, _ in items]
    if any(first >= second for first, second in pairwise(names)):
        raise ValueError("the names of an arithmetic must rise")
