"""The ledger: which record took which positions, and whether each is in exactly one (F-DP-002).

The ledger is the chain of records, from the head back by parents: a STEP takes its batch, a MARK
what it skips. A MARK that rolls the line back takes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from andon.protocol.records import Cursor, Key, PositionRange, Record
from andon_coordinator.core.effects import Skip, StepResult

__all__ = ["JournalEntry", "LedgerFault", "chain_of", "faults_of"]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A record of the journal: what it came to if it is a STEP, what it skipped if a MARK."""

    record: Record
    result: StepResult | None = None
    skipped: Skip | None = None
    note: str = ""
    at_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LedgerFault:
    """Positions of an epoch that are in no record (`gap`), or in more than one (`overlap`)."""

    kind: str
    epoch: int
    positions: PositionRange
    record: Key | None = None
    """The record whose own contributions are at fault, if not the chain is."""


def chain_of(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """The entries of the line's history, first to last: those that the last one descends from."""
    chain: list[JournalEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.record.key, reverse=True):
        parent = chain[-1].record.parent if chain else entry.record.key
        # A record that only workers knew (rule 9) is missing here: the chain goes on before it.
        if parent is not None and entry.record.key <= parent:
            chain.append(entry)
    return chain[::-1]


def faults_of(chain: Sequence[JournalEntry], epoch_size: int | None) -> list[LedgerFault]:
    """Every gap and overlap of a chain; empty if each position is in exactly one record.

    What lies before the first record that the journal has is not looked at. Without an
    epoch's size it ends at its last position taken.
    """
    taken: dict[int, list[PositionRange]] = defaultdict(list)
    faults: list[LedgerFault] = []
    start = end = _start(chain[0]) if chain else Cursor(0, 0)
    for entry in chain:
        record = entry.record
        if entry.result is not None:
            taken[entry.result.epoch].append(entry.result.batch)
            faults += _faults_within(record.key, entry.result)
        if entry.skipped is not None:
            taken[entry.skipped.epoch].append(entry.skipped.positions)
        end = record.cursor
    for epoch in range(start.epoch, end.epoch + 1):
        first = start.position if epoch == start.epoch else 0
        last = end.position if epoch == end.epoch else epoch_size
        faults += [
            LedgerFault(kind, epoch, positions)
            for kind, positions in _uneven(taken[epoch], first, last)
        ]
    return faults


def _start(entry: JournalEntry) -> Cursor:
    if entry.result is not None:
        return Cursor(entry.result.epoch, entry.result.batch.start)
    if entry.skipped is not None:
        return Cursor(entry.skipped.epoch, entry.skipped.positions.start)
    return entry.record.cursor


def _faults_within(key: Key, result: StepResult) -> list[LedgerFault]:
    shares = [positions for part in result.contributions for positions in part.positions]
    return [
        LedgerFault(kind, result.epoch, positions, key)
        for kind, positions in _uneven(shares, result.batch.start, result.batch.stop)
    ]


def _uneven(
    ranges: Iterable[PositionRange], first: int, last: int | None
) -> list[tuple[str, PositionRange]]:
    uneven: list[tuple[str, PositionRange]] = []
    at = first
    for positions in sorted(ranges):
        if positions.start > at:
            uneven.append(("gap", PositionRange(at, positions.start)))
        elif positions.start < at and len(positions):
            overlap = PositionRange(positions.start, min(at, positions.stop))
            uneven.append(("overlap", overlap))
        at = max(at, positions.stop)
    if last is not None and at < last:
        uneven.append(("gap", PositionRange(at, last)))
    elif last is not None and at > last:
        uneven.append(("overlap", PositionRange(last, at)))
    return uneven
