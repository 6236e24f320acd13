"""Collectives through shared memory: what each rank gets, to the bit, and what it is told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from andon.protocol.peer_calls import CallKind
from andon_trainer.core.peer_plan import Places
from andon_trainer.core.peer_work import Work
from andon_trainer.peers.memory import CallDiffers, NeighbourMemory, can_share
from andon_trainer.peers.memory_calls import NotFinite, StageRows, run, transfer
from unit.andon_trainer.call_cases import COLLECTIVES, collective
from unit.andon_trainer.neighbours import RANKS, Array, Closed, opened, together, work

pytestmark = pytest.mark.skipif(
    not can_share(), reason="memory is shared on Linux, with the compiled part: apt-get install gcc"
)

SIZES = (0, 1, 15, 16, 1000, 1024, 1025, 5000, 20_000)
"""Elements of float32: slots have 1024 in the tests, and 64 KiB is the end of small calls."""


@pytest.fixture(scope="module", params=[2, 3, 4])
def memories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[NeighbourMemory]:
    folder = tmp_path_factory.mktemp("shared")
    found = opened(folder, request.param)
    assert list(folder.iterdir()) == [], "names are gone once all have mapped"
    return found


_sequences: dict[int, int] = {}


def exchange(memories: list[NeighbourMemory], of: Callable[[int], Work]) -> list[object]:
    """Makes one call on all ranks."""
    sequence = _sequences[id(memories)] = _sequences.get(id(memories), -1) + 1
    return list(
        together(
            len(memories),
            lambda place: run(memories[place], of(place), sequence, lambda _: None),
        )
    )


def numbers(count: int, size: int, dtype: str = "float32") -> list[Array]:
    chance = np.random.default_rng(size)
    return [(chance.standard_normal(size) * 100).astype(dtype) for _ in range(count)]


def reduced(inputs: list[Array], reduction: str) -> Array:
    result = inputs[0].copy()
    for each in inputs[1:]:
        result = np.maximum(result, each) if reduction == "max" else result + each  # type: ignore[operator]  # numbers
    return result / result.dtype.type(len(inputs)) if reduction == "avg" else result  # type: ignore[operator]  # numbers


def same(one: Array, other: Array) -> None:
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        ("float32", "sum"),
        ("float32", "avg"),
        ("float32", "max"),
        ("float64", "sum"),
        ("int8", "sum"),
    ],
)
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
def test_every_rank_gets_the_reduction_in_the_order_of_ranks(
    memories: list[NeighbourMemory], size: int, dtype: str, reduction: str, apart: bool
) -> None:
    count = len(memories)
    inputs = numbers(count, size, dtype)
    outs = [np.full_like(each, 7) if apart else each.copy() for each in inputs]

    def of(place: int) -> Work:
        give = inputs[place] if apart else outs[place]
        parts = ([give], [outs[place]])
        return work(CallKind.ALL_REDUCE, parts, reduction=reduction, ranks=count)

    assert exchange(memories, of) == [None] * count

    for out in outs:
        same(out, reduced(inputs, reduction))


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("kind", COLLECTIVES, ids=str)
def test_every_rank_gets_what_the_call_means(
    memories: list[NeighbourMemory], kind: CallKind, in_place: bool
) -> None:
    count = len(memories)
    places = Places((tuple(range(count)),))
    uneven = kind in (CallKind.ALL_TO_ALL, CallKind.REDUCE_SCATTER)

    # The last one has several tensors, which follow each other.
    for seed, sizes in enumerate([*([size] for size in SIZES), [3, 5000, 0]]):
        case = collective(
            kind, places, sizes, root=seed % count, in_place=in_place, seed=seed, uneven=uneven
        )
        assert exchange(memories, case.works.__getitem__) == [None] * count
        for rank in range(count):
            case.check(rank)


def test_a_stage_moves_rows_that_lie_in_several_places(memories: list[NeighbourMemory]) -> None:
    count = len(memories)
    sizes = (0, 100, 9000, 1)
    gives = [np.full(sum(sizes), place, np.uint8) for place in range(count)]
    takes = [[np.full(sum(sizes), 99, np.uint8) for _ in range(count)] for _ in range(count)]
    sequence = _sequences[id(memories)] = _sequences.get(id(memories), -1) + 1

    def rows(of: Array, place: int, peer: int, order: int) -> list[memoryview]:
        ends = np.cumsum((0, *sizes[::order]))
        pieces = [of[start:stop].data for start, stop in itertools.pairwise(ends)]
        return [] if place == peer else [memoryview(each) for each in pieces]

    said = [list[tuple[str, int, int]]() for _ in range(count)]

    def act(place: int) -> None:
        stage = StageRows(
            number=2,
            gives=[rows(gives[place], place, peer, 1) for peer in range(count)],
            takes=[rows(takes[place][peer], place, peer, -1) for peer in range(count)],
            ready=lambda *bytes_: said[place].append(("ready", *bytes_)),
            passed=lambda *bytes_: said[place].append(("passed", *bytes_)),
        )
        transfer(memories[place], work(CallKind.BARRIER), sequence, stage, lambda _: None)

    assert together(count, act) == [None] * count

    for place, row in enumerate(takes):
        for peer, out in enumerate(row):
            assert set(out.tolist()) == {99 if peer == place else peer}
    for each in said:
        ready, passed = (
            [step[1:] for step in each if step[0] == word] for word in ("ready", "passed")
        )
        assert ready == passed
        assert len(ready) > 2
        assert [0, *(stop for _, stop in ready)] == [*(start for start, _ in ready), ready[-1][1]]
        assert each.index(("passed", *passed[0])) < each.index(("ready", *ready[2]))


@pytest.mark.parametrize("count", [2, 3])
def test_counters_wrap(tmp_path: Path, count: int) -> None:
    memories, nearly = opened(tmp_path, count), 2**32 - 3
    for memory in memories:
        memory.part = nearly
        memory.give(nearly - 1)
        memory.take(nearly - 1)
    outs = [np.ones(10_000, np.float32) for _ in range(count)]

    def of(place: int) -> Work:
        parts = ([outs[place]], [outs[place]])
        return work(CallKind.ALL_REDUCE, parts, reduction="sum", ranks=count)

    assert exchange(memories, of) == [None] * count
    assert exchange(memories, lambda _: work(CallKind.BARRIER)) == [None] * count

    assert {memory.part for memory in memories} == {memories[0].part}
    assert memories[0].part < 20
    for out in outs:
        assert set(out.tolist()) == {float(count)}


def test_calls_that_differ_are_told_to_all_before_a_byte_is_used(tmp_path: Path) -> None:
    memories = opened(tmp_path, 3)
    outs = [np.full(size, 2, np.float32) for size in (40, 40, 41)]

    def of(place: int) -> Work:
        return work(CallKind.ALL_REDUCE, ([outs[place]], [outs[place]]), reduction="sum", ranks=3)

    first, second, third = exchange(memories, of)

    assert isinstance(first, CallDiffers)
    assert isinstance(second, CallDiffers)
    assert isinstance(third, CallDiffers)
    assert first.rank == second.rank == RANKS[2]
    assert first.mine.call.count == 40
    assert first.theirs is not None
    assert first.theirs.call.count == 41
    for out in outs:
        assert set(out.tolist()) == {2.0}


def test_other_sizes_than_expected_are_a_call_that_differs(tmp_path: Path) -> None:
    memories = opened(tmp_path, 2)
    gives = [[np.zeros(3, np.int8), np.zeros(5, np.int8)] for _ in range(2)]
    takes = [
        [np.zeros(3, np.int8), np.zeros(3, np.int8)],
        [np.zeros(4, np.int8), np.zeros(5, np.int8)],
    ]

    first, second = exchange(
        memories, lambda place: work(CallKind.ALL_TO_ALL, (gives[place], takes[place]))
    )

    assert first is None
    assert isinstance(second, CallDiffers)


def until_found(
    memories: list[NeighbourMemory],
    values: list[Array],
    dtype: type[np.floating[np.typing.NBitBase]],
) -> list[object]:
    """What each rank's sum ended with; whoever waits gives up once another has found a value."""
    found = threading.Event()

    def still(_: tuple[int, ...]) -> None:
        if found.is_set():
            raise TimeoutError

    def act(place: int) -> None:
        parts = ([values[place]], [values[place]])
        ranks = len(memories)
        asked = work(CallKind.ALL_REDUCE, parts, reduction="sum", ranks=ranks, gate=Closed(dtype))
        try:
            run(memories[place], asked, 0, still)
        except NotFinite:
            found.set()
            raise
        finally:
            memories[place].end()

    return list(together(len(memories), act))


@pytest.mark.parametrize("size", [40, 5000, 40_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("place_of_nan", [0, 1, 2])
def test_what_is_not_finite_does_not_leave_its_rank(
    tmp_path: Path, size: int, dtype: type[np.floating[np.typing.NBitBase]], place_of_nan: int
) -> None:
    memories = opened(tmp_path, 3)
    values: list[Array] = [np.ones(size, dtype) for _ in range(3)]
    values[place_of_nan][size - 3] = np.nan

    answers = until_found(memories, values, dtype)

    found = answers[place_of_nan]
    assert isinstance(found, NotFinite), answers
    assert (found.part, found.element, found.reduced) == (0, size - 3, False)
    others = [each for place, each in enumerate(answers) if place != place_of_nan]
    assert all(isinstance(each, TimeoutError) for each in others)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finite_inputs_with_an_infinite_sum_are_told_as_such(
    tmp_path: Path, count: int, dtype: type[np.floating[np.typing.NBitBase]]
) -> None:
    memories = opened(tmp_path, count)
    values: list[Array] = [np.ones(40_000, dtype) for _ in range(count)]
    for each in values:
        each[20_001] = np.finfo(dtype).max

    answers = until_found(memories, values, dtype)

    found = [each for each in answers if isinstance(each, NotFinite)]
    assert found
    assert {(each.part, each.element, each.reduced) for each in found} == {(0, 20_001, True)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_expected_is_asked_once_and_stops_nothing(
    tmp_path: Path, dtype: type[np.floating[np.typing.NBitBase]]
) -> None:
    memories, gates = opened(tmp_path, 3), [Closed(dtype, expects=True) for _ in range(3)]
    values = [np.ones(40_000, dtype) for _ in range(3)]
    for each in values:
        each[::100] = np.inf

    def of(place: int) -> Work:
        parts = ([values[place]], [values[place]])
        return work(CallKind.ALL_REDUCE, parts, reduction="sum", ranks=3, gate=gates[place])

    assert exchange(memories, of) == [None] * 3

    assert [gate.asked for gate in gates] == [1, 1, 1]
    for each in values:
        assert np.isinf(each).sum() == 400
        assert set(each[np.isfinite(each)].tolist()) == {3.0}
