"""Records: keys in order, terms that only grow, records that come after their parents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.records import (
    TERM_AHEAD_S,
    Cursor,
    Key,
    PositionRange,
    Record,
    RecordKind,
    latest_plausible_term,
    make_term,
)
from unit.andon.strategies import BOUNDED, u32

START = Cursor(0, 0)


def test_keys_are_ordered_as_the_pair_of_term_and_round() -> None:
    assert Key(1, 9) < Key(2, 0) < Key(2, 1)


@pytest.mark.parametrize(("term", "number"), [(0, 1), (-1, 1), (2**64, 1), (1, -1), (1, 2**64)])
def test_a_key_beyond_64_bits_is_refused(term: int, number: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Key(term, number)


def test_a_key_is_short_in_a_log_line() -> None:
    assert str(Key(7 << 32 | 0xAB, 12)) == "7.000000ab/12"


@BOUNDED
@given(st.integers(0, 2**63), st.floats(0, 2**31), u32)
def test_a_term_is_above_every_term_seen(greatest: int, clock_s: float, bits: int) -> None:
    term = make_term(greatest, clock_s, bits)

    # Above whatever random bits another coordinator drew under the same counter.
    assert term // 2**32 > greatest // 2**32
    assert term % 2**32 == bits


def test_a_term_counts_from_the_clock_when_nothing_was_seen() -> None:
    assert make_term(0, 1_700_000_000.9, 5) == 1_700_000_000 * 2**32 + 5


def test_terms_grow_though_the_clock_stands_still_or_goes_back() -> None:
    term, terms = 0, []
    for clock_s in (100.0, 100.0, 100.0, 50.0, 99.0):
        term = make_term(term, clock_s, 0)
        terms.append(term // 2**32)

    assert terms == [100, 101, 102, 103, 104]


def test_a_term_above_the_last_counter_of_all_is_the_next_number() -> None:
    last = (2**32 - 1 << 32) + 5

    assert make_term(last, 100.0, 7) == last + 1


@pytest.mark.parametrize(
    ("counter", "own", "clock_s", "plausible"),
    [
        (1000 + TERM_AHEAD_S, 1, 1000.0, True),
        (1001 + TERM_AHEAD_S, 1, 1000.0, False),
        # A coordinator whose journal is ahead of the clock is believed by itself.
        (3000 + TERM_AHEAD_S, 3000, 1000.0, True),
        (2**32 - 2, 2**32 - 1, 1000.0, True),
        (2**32 - 1, 2**32 - 1, 1000.0, False),
    ],
)
def test_a_term_is_plausible_up_to_a_year_ahead_of_clock_or_own_term(
    counter: int, own: int, clock_s: float, plausible: bool
) -> None:
    assert (counter << 32 <= latest_plausible_term(own << 32, clock_s)) is plausible


@pytest.mark.parametrize("bits", [-1, 2**32])
def test_random_bits_beyond_32_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        make_term(0, 0.0, bits)


def test_a_record_does_not_come_before_its_parent() -> None:
    for parent in (Key(1, 2), Key(1, 3), Key(2, 0)):
        with pytest.raises(ValueError, match="does not come after its parent"):
            Record(Key(1, 2), parent, RecordKind.STEP, 1, START, (0,))


def test_a_record_with_a_worker_twice_or_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a roster"):
        Record(Key(1, 2), None, RecordKind.STEP, 1, START, (0, 1, 0))
    with pytest.raises(ValueError, match="not a roster"):
        Record(Key(1, 2), None, RecordKind.STEP, 1, START, (-1,))
    with pytest.raises(ValueError, match="not a step"):
        Record(Key(1, 2), None, RecordKind.STEP, -1, START, (0,))


def test_an_initial_record_has_no_parent() -> None:
    record = Record(Key(1, 1), None, RecordKind.INITIAL, 0, START, (0,))

    assert record.parent is None


@pytest.mark.parametrize(("start", "stop"), [(2, 1), (-1, 1), (0, 2**64)])
def test_an_impossible_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a range"):
        PositionRange(start, stop)


def test_a_range_may_be_empty() -> None:
    assert len(PositionRange(3, 3)) == 0
    assert len(PositionRange(3, 7)) == 4


def test_a_negative_cursor_is_refused() -> None:
    for epoch, position in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="not a cursor"):
            Cursor(epoch, position)
