"""The map of the reducers: the whole model, each element once, evenly, cut between chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.reducers import ReducerShare, chunks_by_address, partition

CHUNK = 100
FOUR = ("", "beta:1", "delta:1", "gamma:1")


def layout_of(*sizes: int) -> Layout:
    return Layout(
        tuple(
            Block(BlockKind.OTHER, f"b{i}", (Component(f"w{i}", (size,)),))
            for i, size in enumerate(sizes)
        )
    )


def elements_by_address(shares: tuple[ReducerShare, ...]) -> dict[str, int]:
    elements: dict[str, int] = {}
    for share in shares:
        elements[share.address] = elements.get(share.address, 0) + share.stop - share.start
    return elements


def test_one_reducer_averages_the_whole_model() -> None:
    assert partition(layout_of(70, 250), CHUNK, [""]) == (ReducerShare("", 0, 320),)


def test_a_line_without_reducers_has_no_map() -> None:
    assert partition(layout_of(70), CHUNK, []) == ()


def test_every_block_of_as_many_chunks_as_reducers_is_shared_by_all_of_them() -> None:
    layout = layout_of(*(400,) * 4)

    lanes = chunks_by_address(layout, CHUNK, partition(layout, CHUNK, FOUR))

    chunks = {address: [len(block) for block in lane] for address, lane in lanes.items()}
    assert chunks == {address: [1, 1, 1, 1] for address in FOUR}


def test_the_map_of_a_very_large_model_stays_short() -> None:
    layout = layout_of(*(400 * CHUNK,) * 100)

    shares = partition(layout, CHUNK, FOUR)

    assert len(shares) < 512


def test_the_last_block_of_a_very_large_model_is_shared_by_all_reducers() -> None:
    layout = layout_of(*(400 * CHUNK,) * 100, 4 * CHUNK)

    lanes = chunks_by_address(layout, CHUNK, partition(layout, CHUNK, FOUR))

    assert [len(lanes[address][-1]) for address in FOUR] == [1, 1, 1, 1]


def test_small_blocks_of_a_small_model_are_shared_too() -> None:
    shares = partition(layout_of(*(10,) * 8), CHUNK, FOUR)

    assert elements_by_address(shares) == dict.fromkeys(FOUR, 20)


def test_more_reducers_than_chunks_leave_some_without_a_share() -> None:
    shares = partition(layout_of(50, 50), CHUNK, FOUR)

    assert sum(elements_by_address(shares).values()) == 100
    assert 1 <= len(shares) <= 2


def test_a_model_without_elements_is_the_first_reducers() -> None:
    assert partition(layout_of(0), CHUNK, FOUR) == (ReducerShare("", 0, 0),)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=8),
    count=st.integers(2, 9),
    chunk=st.integers(1, 300),
)
def test_each_chunk_goes_to_one_reducer_in_order(sizes: list[int], count: int, chunk: int) -> None:
    layout = layout_of(*sizes)
    addresses = [f"r{number}:1" for number in range(count)]

    lanes = chunks_by_address(layout, chunk, partition(layout, chunk, addresses))

    for lane in lanes.values():
        flat = [each for block in lane for each in block]
        assert flat == sorted(flat)
    given_out = sorted(each for lane in lanes.values() for block in lane for each in block)
    assert given_out == list(layout.chunks(chunk))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=20),
    count=st.integers(2, 9),
)
def test_no_reducer_has_more_than_another_by_more_than_a_chunk(
    sizes: list[int], count: int
) -> None:
    addresses = [f"r{number}:1" for number in range(count)]

    shares = partition(layout_of(*sizes), CHUNK, addresses)

    elements = elements_by_address(shares)
    averages = [elements.get(address, 0) for address in addresses]
    assert max(averages) - min(averages) <= CHUNK


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ([], "gaps"),
        ([ReducerShare("a:1", 0, 200)], "gaps"),
        ([ReducerShare("a:1", 0, 200), ReducerShare("b:1", 100, 320)], "overlap"),
        ([ReducerShare("a:1", 0, 200), ReducerShare("b:1", 200, 400)], "gaps"),
        ([ReducerShare("a:1", 0, 150), ReducerShare("b:1", 150, 320)], "inside a chunk of block 1"),
    ],
)
def test_shares_that_do_not_cover_the_model_are_refused(
    shares: list[ReducerShare], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        chunks_by_address(layout_of(70, 250), CHUNK, shares)


def test_a_share_that_ends_before_it_begins_can_not_be_built() -> None:
    with pytest.raises(ValueError, match="before"):
        ReducerShare("a:1", 5, 4)
