"""The ledger: every position is in exactly one record of the chain (F-DP-002)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_coordinator.core.step_results import Skip, StepContribution
from andon_coordinator.transport.reader import JournalEntry, LedgerFault, chain_of, faults_of
from scenarios import line_values

SIZE = 10


def step(
    number: int,
    parent: int | None,
    epoch: int,
    positions: tuple[int, int],
    shares: tuple[tuple[int, int], ...] | None = None,
) -> JournalEntry:
    start, stop = positions
    cursor = Cursor(epoch + 1, 0) if stop == SIZE else Cursor(epoch, stop)
    record = Record(
        Key(1, number),
        None if parent is None else Key(1, parent),
        RecordKind.STEP,
        number,
        cursor,
        (0, 1),
    )
    parts = ((start, stop),) if shares is None else shares
    result = line_values.result(
        epoch=epoch,
        batch=PositionRange(start, stop),
        loss=0.0,
        samples=stop - start,
        weight=1.0,
        seconds=0.0,
        contributions=tuple(
            StepContribution(
                worker=rank,
                rank=rank,
                positions=(PositionRange(*part),),
                samples=part[1] - part[0],
                weight=1.0,
                loss_sum=0.0,
            )
            for rank, part in enumerate(parts)
        ),
    )
    return JournalEntry(record, result)


def mark(number: int, parent: int, cursor: Cursor, skip: Skip | None = None) -> JournalEntry:
    record = Record(Key(1, number), Key(1, parent), RecordKind.MARK, number, cursor, ())
    return JournalEntry(record, skipped=skip)


def gap(start: int, stop: int) -> LedgerFault:
    return LedgerFault("gap", 0, PositionRange(start, stop))


FIRST = step(1, None, 0, (0, 6))
EARLY = replace(FIRST, record=replace(FIRST.record, cursor=Cursor(1, 0)))
SKIP = Skip(0, PositionRange(6, 10), 1, "ann")
CHAINS: dict[str, tuple[list[JournalEntry], list[LedgerFault]]] = {
    "end to end": ([FIRST, step(2, 1, 0, (6, 10)), step(3, 2, 1, (0, 6))], []),
    "a gap": ([step(1, None, 0, (0, 3)), step(2, 1, 0, (5, 10))], [gap(3, 5)]),
    "in two steps": (
        [FIRST, step(2, 1, 0, (4, 10))], [LedgerFault("overlap", 0, PositionRange(4, 6))],
    ),
    "an epoch ended early": ([EARLY, step(2, 1, 1, (0, 6))], [gap(6, 10)]),
    "skipped": ([FIRST, mark(2, 1, Cursor(1, 0), SKIP), step(3, 2, 1, (0, 6))], []),
    "a line that went back over an epoch's end": (
        chain_of([
            step(1, None, 0, (0, 3)), step(2, 1, 0, (3, 6)),
            mark(3, 1, Cursor(1, 4),
                 Skip(1, PositionRange(0, 4), 0, "", earlier=((0, PositionRange(3, 10)),))),
            step(4, 3, 1, (4, 6)),
        ]),
        [],
    ),
    "a cursor moved without a skip": ([FIRST, mark(2, 1, Cursor(1, 0))], [gap(6, 10)]),
    "shares do not fill their batch": (
        [step(1, None, 0, (0, 6), shares=((0, 3), (2, 5)))],
        [
            LedgerFault("overlap", 0, PositionRange(2, 3), Key(1, 1)),
            LedgerFault("gap", 0, PositionRange(5, 6), Key(1, 1)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("chain", "faults"), CHAINS.values(), ids=CHAINS)
def test_f_dp_002_every_position_must_be_in_one_record(
    chain: list[JournalEntry], faults: list[LedgerFault]
) -> None:
    assert faults_of(chain, SIZE) == faults


def test_f_dp_002_samples_without_end_are_checked_too() -> None:
    chain = [FIRST, step(2, 1, 0, (6, 9)), step(3, 2, 0, (12, 15))]

    assert faults_of(chain, None) == [gap(9, 12)]


def test_record_that_was_rolled_back_is_not_on_the_chain() -> None:
    first, undone = step(1, None, 0, (0, 6)), step(2, 1, 0, (6, 10))
    back = mark(3, 1, Cursor(0, 6))
    again = step(4, 3, 0, (6, 10))

    chain = chain_of([again, undone, back, first])

    assert chain == [first, back, again]
    assert faults_of(chain, SIZE) == []


def test_f_dp_002_record_that_the_journal_lost_shows_as_a_gap() -> None:
    first, third = step(1, None, 0, (0, 3)), step(3, 2, 0, (6, 10))

    chain = chain_of([first, third])

    assert chain == [first, third]
    assert faults_of(chain, SIZE) == [gap(3, 6)]


def test_no_records_have_no_fault() -> None:
    assert chain_of([]) == []
    assert faults_of([], SIZE) == []
