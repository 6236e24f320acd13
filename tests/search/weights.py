"""Weights, represented by their history: two weights are equal exactly if their histories are."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from andon.protocol.records import Cursor, Key, Record, RecordKind
from search.numbers import Incarnation, Weights

__all__ = [
    "WRONG_DIGEST",
    "Averages",
    "Contribution",
    "Library",
    "Wrong",
    "contribution_in",
    "payload_of",
]

WRONG_DIGEST = b"wrong"
"""How each digest of something that was computed wrong begins."""


class Wrong(Exception):
    """A state that must never occur."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one worker gave to a round: computed from which weights, over which positions.

    Positions are counted through all epochs. They are what is really in it; `samples` is how many
    positions the worker takes it for.
    """

    key: Key
    worker: int
    start_from: Weights
    positions: tuple[tuple[int, int], ...]
    samples: int


# Contributions by number: a payload is its contribution's number, as one float32's bytes.
_CONTRIBUTIONS: list[Contribution] = []
_NUMBERS: dict[Contribution, int] = {}


def payload_of(contribution: Contribution) -> memoryview:
    """The bytes that stand for a contribution."""
    number = _NUMBERS.setdefault(contribution, len(_CONTRIBUTIONS))
    if number == len(_CONTRIBUTIONS):
        _CONTRIBUTIONS.append(contribution)
    return memoryview(struct.pack("<I", number))


def contribution_in(payload: memoryview) -> Contribution:
    """The contribution that bytes stand for."""
    number: int = struct.unpack("<I", payload)[0]
    return _CONTRIBUTIONS[number]


@dataclass(frozen=True, slots=True)
class Averages:
    """A reducer's average, as the contributions in it: in rank order, or nodes in theirs."""

    key: Key
    world_size: int
    total_weight: float
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class _Origin:
    """How weights came to be: initial ones of a process, or by a record from others."""

    process: Incarnation | None = None
    before: Weights | None = None
    record: Key | None = None
    covered: int = 0
    """One key may name different records on different ways of a search."""
    owed: tuple[int, ...] = ()
    contributions: tuple[Contribution, ...] = ()


class Library:
    """All weights and contributions that any state of a search knows."""

    def __init__(self, epoch_size: int, *, by_nodes: bool = False) -> None:
        self._epoch_size = epoch_size
        self._by_nodes = by_nodes
        self._origins: dict[_Origin, Weights] = {}
        self._heads: list[Key | None] = []
        self._covered: list[int] = []
        self._owed: list[tuple[int, ...]] = []

    def initial(self, process: Incarnation) -> Weights:
        """The weights with which a process starts."""
        return self._number(_Origin(process=process), None)

    def head(self, weights: Weights) -> Key | None:
        """The record that made them."""
        return self._heads[weights]

    def at(self, cursor: Cursor) -> int:
        """A cursor's position, counted through all epochs."""
        return cursor.epoch * self._epoch_size + cursor.position

    def has(self, weights: Weights, at: int) -> bool:
        """Whether a record up to these weights has taken a position, or skipped it."""
        return at < self._covered[weights] and at not in self._owed[weights]

    def applied(self, weights: Weights, record: Record, averages: Averages | None) -> Weights:
        """Weights after a record.

        Raises:
            Wrong: the record is no step of exactly these averages from these weights.
        """
        contributions: tuple[Contribution, ...] = ()
        if record.kind is RecordKind.STEP:
            contributions = self._checked(weights, record, averages)
        elif record.kind is RecordKind.MARK and self.at(record.cursor) < self._covered[weights]:
            raise Wrong(f"F-DP-002: record {record.key} goes back in the data")
        at = self.at(record.cursor)
        origin = _Origin(
            before=weights,
            record=record.key,
            covered=at,
            owed=self._owed_at(record.cursor),
            contributions=contributions,
        )
        return self._number(origin, record.key)

    def _checked(
        self, weights: Weights, record: Record, averages: Averages | None
    ) -> tuple[Contribution, ...]:
        if averages is None or averages.key != record.key:
            held = None if averages is None else averages.key
            raise Wrong(f"C-COMMIT-001: record {record.key} is applied with averages of {held}")
        parts = averages.contributions
        # A rank without positions abstains. The check below finds a missing rank that has some.
        given = [part.worker for part in parts]
        if self._by_nodes:
            given.sort(key=record.roster.index)  # Nodes are in the order of their grains,
            given = list(dict.fromkeys(given))  # and a worker may have several.
        if given != [worker for worker in record.roster if worker in given]:
            raise Wrong(f"C-COMMIT-001: {record.key} is not the contributions of its roster")
        if any(part.start_from != weights or part.key != record.key for part in parts):
            raise Wrong(f"C-COMMIT-001: a contribution to {record.key} is of other weights")
        taken = sorted(at for part in parts for each in part.positions for at in range(*each))
        # What was owed, and what the window took, less what is still owed.
        at = self.at(record.cursor)
        due = [*self._owed[weights], *range(self._covered[weights], at)]
        owed = self._owed_at(record.cursor)
        if taken != sorted(set(due).difference(owed)) or not set(owed) <= set(due):
            raise Wrong(
                f"F-DP-002: {record.key} takes {taken} up to {at}, {due} were due, {list(owed)} "
                "are owed after it"
            )
        return parts

    def _owed_at(self, cursor: Cursor) -> tuple[int, ...]:
        first = cursor.epoch * self._epoch_size
        return tuple(first + at for each in cursor.owed for at in range(each.start, each.stop))

    def _number(self, origin: _Origin, head: Key | None) -> Weights:
        weights = self._origins.get(origin)
        if weights is None:
            weights = self._origins[origin] = Weights(len(self._heads))
            self._heads.append(head)
            self._covered.append(origin.covered)
            self._owed.append(origin.owed)
        return weights
