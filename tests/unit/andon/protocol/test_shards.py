"""Shards: disjoint, complete, fair; every position of an epoch once.

Examples are in `conformance/shares.json`, and tested with it (`test_conformance`).
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import (
    Ranges,
    Split,
    cursor_after,
    deal,
    divide,
    merged,
    next_batch,
    reassign,
    shard_of,
    subtract,
)
from unit.andon.strategies import BOUNDED


def shares(batch: PositionRange, world_size: int) -> list[PositionRange]:
    return [shard_of(batch, rank, world_size) for rank in range(world_size)]


@BOUNDED
@given(st.integers(0, 2**60), st.integers(0, 2**40), st.integers(1, 200))
def test_c_shard_001_shares_are_disjoint_complete_and_in_rank_order(
    start: int, length: int, world_size: int
) -> None:
    batch = PositionRange(start, start + length)

    assigned = shares(batch, world_size)

    assert assigned[0].start == batch.start
    assert assigned[-1].stop == batch.stop
    assert all(one.stop == next_one.start for one, next_one in itertools.pairwise(assigned))


@BOUNDED
@given(st.integers(0, 10_000), st.integers(1, 200))
def test_c_shard_001_shares_differ_by_at_most_one_position(length: int, world_size: int) -> None:
    sizes = [len(share) for share in shares(PositionRange(7, 7 + length), world_size)]

    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_c_shard_001_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="not below the world size"):
        shard_of(PositionRange(0, 4), rank, world_size)


def test_c_shard_001_the_last_batch_of_an_epoch_is_short() -> None:
    assert next_batch(Cursor(0, 0), 4, 10) == PositionRange(0, 4)
    assert next_batch(Cursor(0, 8), 4, 10) == PositionRange(8, 10)
    assert next_batch(Cursor(0, 8), 4, 12) == PositionRange(8, 12)


def test_a_stream_without_known_end_has_no_short_batch() -> None:
    cursor = Cursor(0, 8)

    batch = next_batch(cursor, 4, None)

    assert batch == PositionRange(8, 12)
    assert cursor_after(cursor, batch, None) == Cursor(0, 12)


def test_an_epoch_ends_where_its_last_batch_does() -> None:
    assert cursor_after(Cursor(3, 8), PositionRange(8, 10), 10) == Cursor(4, 0)
    assert cursor_after(Cursor(3, 4), PositionRange(4, 8), 10) == Cursor(3, 8)


def test_a_batch_that_does_not_begin_at_the_cursor_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond an epoch of 10"):
        next_batch(Cursor(0, 10), 4, 10)
    with pytest.raises(ValueError, match="does not begin at the cursor"):
        cursor_after(Cursor(0, 4), PositionRange(0, 4), 10)
    with pytest.raises(ValueError, match="at least 1 position"):
        next_batch(Cursor(0, 0), 0, 10)


@BOUNDED
@given(
    st.integers(1, 300), st.integers(1, 64), st.booleans(), st.lists(st.integers(1, 9), min_size=1)
)
def test_f_dp_002_an_epoch_covers_each_of_its_positions_exactly_once(
    dataset_size: int, global_batch: int, drop_last: bool, world_sizes: list[int]
) -> None:
    plan = RunPlan(
        global_batch=min(global_batch, dataset_size) if drop_last else global_batch,
        dataset_size=dataset_size,
        drop_last=drop_last,
    )
    size, cursor, step = plan.epoch_size, Cursor(5, 0), 0
    covered: list[int] = []

    while cursor.epoch == 5:
        batch = next_batch(cursor, plan.global_batch, size)
        # The roster may be another at every step.
        for share in shares(batch, world_sizes[step % len(world_sizes)]):
            covered += range(share.start, share.stop)
        cursor, step = cursor_after(cursor, batch, size), step + 1
        assert not drop_last or len(batch) == plan.global_batch

    left_out = dataset_size % plan.global_batch if drop_last else 0
    assert covered == list(range(dataset_size - left_out))
    assert cursor == Cursor(6, 0)
    assert step == -(-(dataset_size - left_out) // plan.global_batch)


@st.composite
def histories(draw: st.DrawFn) -> tuple[PositionRange, list[list[Ranges]]]:
    """A batch, and who was left with what after each attempt at it, as workers come and go."""
    start, length = draw(st.integers(0, 2**40)), draw(st.integers(0, 60))
    batch = PositionRange(start, start + length)
    attempts: list[list[Ranges]] = []
    kept: list[Ranges] = [()] * draw(st.integers(1, 8))
    for _ in range(draw(st.integers(1, 4))):
        attempts.append(kept)
        assigned = reassign(batch, kept)
        survivors = [ranges for ranges in assigned if draw(st.booleans())]
        newcomers: list[Ranges] = [()] * draw(st.integers(0 if survivors else 1, 3))
        kept = [*survivors, *newcomers]
    return batch, [*attempts, kept]


@BOUNDED
@given(histories())
def test_f_dp_002_a_reassigned_batch_is_disjoint_and_complete(
    history: tuple[PositionRange, list[list[Ranges]]],
) -> None:
    batch, attempts = history

    for kept in attempts:
        assigned = reassign(batch, kept)

        parts = sorted(part for share in assigned for part in share)
        assert sum(map(len, parts)) == len(batch)
        assert merged(parts) == merged([batch])


@BOUNDED
@given(histories())
def test_f_dp_006_a_survivor_keeps_every_position_that_it_was_assigned(
    history: tuple[PositionRange, list[list[Ranges]]],
) -> None:
    batch, attempts = history

    for kept in attempts:
        for before, share in zip(kept, reassign(batch, kept), strict=True):
            assert subtract(before, share) == ()
            assert merged(share) == share


@BOUNDED
@given(histories())
def test_each_lost_position_goes_to_whoever_has_fewest_by_then(
    history: tuple[PositionRange, list[list[Ranges]]],
) -> None:
    batch, attempts = history

    for kept in attempts:
        expected = [sum(map(len, ranges)) for ranges in kept]
        for _lost in range(len(batch) - sum(expected)):
            expected[expected.index(min(expected))] += 1

        assert [sum(map(len, share)) for share in reassign(batch, kept)] == expected


@BOUNDED
@given(st.integers(0, 2**60), st.integers(0, 2**40), st.integers(1, 200))
def test_a_batch_that_was_never_assigned_is_divided_in_plain_shards(
    start: int, length: int, world_size: int
) -> None:
    batch = PositionRange(start, start + length)

    assigned = reassign(batch, [()] * world_size)

    assert assigned == tuple(merged([share]) for share in shares(batch, world_size))


@pytest.mark.parametrize(
    "kept",
    [
        [],
        [(PositionRange(0, 3),), (PositionRange(2, 4),)],
        [(PositionRange(0, 5),)],
    ],
)
def test_shares_that_overlap_or_leave_the_batch_are_refused(kept: list[Ranges]) -> None:
    with pytest.raises(ValueError, match="overlap, or are not of"):
        reassign(PositionRange(0, 4), kept)


def test_subtract_takes_positions_out_of_ranges() -> None:
    batch = [PositionRange(0, 10), PositionRange(20, 25)]

    left = subtract(batch, [PositionRange(24, 30), PositionRange(3, 5), PositionRange(0, 1)])

    assert left == (PositionRange(1, 3), PositionRange(5, 10), PositionRange(20, 24))
    assert subtract(left, left) == ()
    assert subtract(batch, []) == tuple(batch)


def test_a_stream_of_unknown_length_ends_before_its_positions_are_too_large_to_keep() -> None:
    last = Cursor(0, COUNT_LIMIT - 3)

    batch = next_batch(last, 2**32 - 1, None)

    assert batch == PositionRange(COUNT_LIMIT - 3, COUNT_LIMIT)
    assert cursor_after(last, batch, None) == Cursor(1, 0)


def sizes_of(assigned: tuple[Ranges, ...]) -> list[int]:
    return [sum(map(len, share)) for share in assigned]


@st.composite
def uneven_splits(draw: st.DrawFn) -> Split:
    ranks = draw(st.integers(1, 8))
    some = st.one_of(st.integers(1, 12), st.integers(1, 2**32 - 1))
    targets = draw(st.lists(some, min_size=ranks, max_size=ranks))
    return Split(tuple(targets), draw(st.booleans()))


@BOUNDED
@given(uneven_splits(), st.integers(0, 120), st.data())
def test_f_dp_002_an_uneven_split_gives_each_position_to_one_rank_by_the_rule(
    split: Split, length: int, data: st.DataObject
) -> None:
    batch, targets = PositionRange(5, 5 + length), split.targets
    first = deal(batch, split, len(targets))
    kept = [share if data.draw(st.booleans()) else () for share in first]

    assigned = reassign(batch, kept, split)

    covered = sorted(p for share in assigned for r in share for p in range(r.start, r.stop))
    assert covered == list(range(batch.start, batch.stop))
    expected = sizes_of(tuple(kept))
    for _free in range(length - sum(expected)):
        expected[
            min(
                range(len(targets)),
                key=lambda r: (expected[r] > 0, Fraction(2 * expected[r] + 1, targets[r]), r),
            )
        ] += 1
    assert sizes_of(assigned) == expected
    for before, share in zip(kept, assigned, strict=True):
        assert subtract(before, share) == ()


def test_a_split_of_other_ranks_or_with_impossible_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="2 targets for 3 ranks"):
        deal(PositionRange(0, 4), Split((1, 1)), 3)
    for target in (0, 2**32):
        with pytest.raises(ValueError, match="targets are numbers from 1"):
            Split((target,))


@BOUNDED
@given(histories(), st.integers(1, 9))
def test_dividing_positions_keeps_their_order_and_evens_the_parts(
    history: tuple[PositionRange, list[list[Ranges]]], parts: int
) -> None:
    batch, attempts = history
    for kept in attempts:
        for ranges in reassign(batch, kept):
            divided = list(divide(ranges, parts))

            assert merged(part for piece in divided for part in piece) == ranges
            sizes = [sum(map(len, piece)) for piece in divided]
            assert len(sizes) == parts
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1
