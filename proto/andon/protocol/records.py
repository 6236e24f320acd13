"""Records: the keys, cursors and commits of a line's history (docs/protocol.md, section 2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

__all__ = [
    "TERM_AHEAD_S",
    "Cursor",
    "Key",
    "PositionRange",
    "Record",
    "RecordKind",
    "accuracy_of",
    "latest_plausible_term",
    "make_term",
]

_U32 = 2**32
_U64 = 2**64

TERM_AHEAD_S = 366 * 24 * 3600
"""How far a term's counter, which is in seconds, may be ahead of the clock: a year.

No clock is wrong by more for long without somebody noticing. Each start adds one second to a
counter that is ahead, so 32 bits last for billions of starts.
"""


class _KeyNumbers(NamedTuple):
    """The numbers of a key; a tuple, because a step hashes and compares keys a hundred times."""

    term: int
    round: int


class Key(_KeyNumbers):
    """The name of one round, and of the record that it may become; ordered as (term, round)."""

    __slots__ = ()

    def __new__(cls, term: int, round: int) -> Self:
        """Refuses what does not fit the wire's unsigned 64 bits."""
        # Term 0 is "no key" on the wire, where an absent message and an empty one are the same.
        if not (0 < term < _U64 and 0 <= round < _U64):
            raise ValueError(f"a key is two unsigned 64-bit numbers, not {term}, {round}")
        return tuple.__new__(cls, (term, round))

    def __str__(self) -> str:
        """The term's counter and random bits, and the round, short enough for a log line."""
        return f"{self.term // _U32}.{self.term % _U32:08x}/{self.round}"


def make_term(greatest_seen: int, clock_s: float, random_bits: int) -> int:
    """A term above every term seen, unique even if two coordinators have one counter (rule 1).

    `greatest_seen` is the greatest term of the journal and of all Joins (0 if none), `clock_s`
    the time since the Unix epoch, `random_bits` 32 bits from a good source. The counter in the
    high half is max(1 + the greatest counter seen, the clock in seconds), so that a coordinator
    that lost its journal still counts above its predecessor. If no greater counter is left (an
    older Andon accepted any term from a peer), the term is the next number, so that a line whose
    journal holds such a term can still go on.
    """
    if not 0 <= random_bits < _U32:
        raise ValueError(f"random_bits must be 32 bits, not {random_bits}")
    # The counter decides which term is newer. The random bits only make terms differ that two
    # coordinators without a common journal draw in the same second.
    counter = max(greatest_seen // _U32 + 1, int(clock_s))
    return counter * _U32 + random_bits if counter < _U32 else greatest_seen + 1


def latest_plausible_term(known: int, clock_s: float) -> int:
    """The greatest term that a peer may show; no coordinator has made a greater one (rule 1).

    The counter of a known term is as good as the clock: a journal may be ahead of the clock, and
    so may a worker that has met its coordinator.

    Args:
        known: a coordinator's term.
        clock_s: the time since the Unix epoch.
    """
    believed = max(known // _U32, int(clock_s)) + TERM_AHEAD_S
    # Two below the end of 32 bits, so that the coordinator can still draw a greater term.
    return min(believed, _U32 - 2) * _U32 + _U32 - 1


@dataclass(frozen=True, slots=True, order=True)
class PositionRange:
    """Positions `start` up to, not including, `stop` of one epoch."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuses a range that ends before it starts."""
        if not 0 <= self.start <= self.stop < _U64:
            raise ValueError(f"not a range of positions: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        """How many positions it holds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """The first position that no window has taken yet, as (epoch, position), and what is owed."""

    epoch: int
    position: int
    owed: tuple[PositionRange, ...] = ()
    """Positions of the epoch before `position` that are in no record yet and not skipped, as rising
    ranges: none is empty, and none touches the next."""

    def __post_init__(self) -> None:
        """Refuses numbers beyond the wire's 64 bits, and positions that can't be owed."""
        if not (0 <= self.epoch < _U64 and 0 <= self.position < _U64):
            raise ValueError(f"not a cursor: epoch {self.epoch}, position {self.position}")
        if not self.owed:
            return
        if not all(map(len, self.owed)) or any(a.stop >= b.start for a, b in pairwise(self.owed)):
            raise ValueError("a cursor's owed ranges must rise, and none may be empty")
        if self.owed[-1].stop > self.position:
            raise ValueError(
                f"position {self.owed[-1].stop - 1} is owed, but the cursor is at {self.position}"
            )


class RecordKind(enum.Enum):
    """What a record does to the line; values are those of `andon.v1.RecordKind`."""

    INITIAL = 1
    STEP = 2
    MARK = 3


@dataclass(frozen=True, slots=True)
class Record:
    """One commit. Its key is its id; `parent` is the id of the commit before it."""

    key: Key
    parent: Key | None
    kind: RecordKind
    step: int
    cursor: Cursor
    roster: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses a record that does not come after its parent, and impossible numbers."""
        if self.parent is not None and self.parent >= self.key:
            raise ValueError(f"record {self.key} does not come after its parent {self.parent}")
        if not 0 <= self.step < _U64:
            raise ValueError(f"record {self.key}: not a step: {self.step}")
        if len(set(self.roster)) != len(self.roster) or min(self.roster, default=0) < 0:
            raise ValueError(f"record {self.key}: not a roster: {self.roster}")


def accuracy_of(correct: int | None, samples: int) -> float | None:
    """The fraction of a step's samples that were right, from 0 to 1; None if it is unknown."""
    return None if correct is None or not samples else correct / samples
