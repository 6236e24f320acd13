"""The ring's core at its gate: values that must not be averaged, neighbours that break rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.messages import Operation, RingChunk, RingHeader, RingStage
from andon.protocol.run_settings import Policy
from andon.wire.frames import frame_pass, parse_pass
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.core.ring_landing import Arrived
from andon_trainer.core.ring_mean import RingViolation
from unit.andon_trainer.ring_bench import KEY, Floats, Ring

FLOAT32 = Policy(chunk_elements=3)


def ones(ranks: int, size: int) -> list[list[Floats]]:
    return [[np.ones(size, dtype=np.float32)] for _ in range(ranks)]


def begun(
    ranks: int = 3,
    size: int = 9,
    weights: list[float] | None = None,
    checked: list[bool] | None = None,
) -> Ring:
    """A ring whose ranks all know all terms, and gave nothing yet."""
    ring = Ring([size], weights or [1.0] * ranks, FLOAT32, checked=checked)
    for rank in range(ranks):
        ring.do(rank, ring.rounds[rank].begin())
    while any(ring.links):
        for rank in range(ranks):
            if ring.links[rank]:
                ring.deliver(rank)
    return ring


def poison(ring: Ring, link: int, value: float) -> None:
    """Puts a value into the oldest chunk on a link, as a rank without a gate would."""
    chunk = parse_pass(ring.links[link].popleft())
    assert isinstance(chunk, RingChunk)
    numbers = np.frombuffer(chunk.payload, "<f4").copy()
    numbers[1] = value
    ring.links[link].appendleft(frame_pass(replace(chunk, payload=memoryview(numbers.tobytes()))))


def test_f_dp_003_a_value_that_a_neighbour_let_pass_is_traced_to_it() -> None:
    ring = begun()
    for rank in (1, 2):
        ring.do(rank, ring.rounds[rank].submit(0, np.ones(9, np.float32)))
    poison(ring, 1, float("nan"))

    ring.deliver(1)

    (failed,) = ring.said[2]
    assert isinstance(failed, ExchangeFailed)
    # Segment 1 starts at rank 1, at element 3.
    found = (failed.kind, failed.rank, failed.block, failed.element, failed.value)
    assert found == ("NON_FINITE_GRADIENT", 1, 0, 4, "nan")
    assert not any(isinstance(said, AveragesComplete) for said in ring.said[2])


def test_who_merely_passed_a_value_on_is_not_blamed() -> None:
    ring = begun(weights=[1.0, 1.0, 0.0])
    for rank in (0, 1):
        ring.do(rank, ring.rounds[rank].submit(0, np.ones(9, np.float32)))
    poison(ring, 1, float("inf"))

    ring.deliver(1)
    ring.deliver(2)

    (failed,) = ring.said[0]
    assert isinstance(failed, ExchangeFailed)
    assert (failed.kind, failed.rank) == ("NON_FINITE_GRADIENT", 1)


def test_a_mean_without_a_number_of_its_own_is_checked_where_it_ends() -> None:
    ring = begun(weights=[0.0, 1.0, 0.0])
    ring.do(1, ring.rounds[1].submit(0, np.ones(9, np.float32)))
    poison(ring, 1, float("-inf"))

    for _ in range(3):
        ring.deliver(1)
    for _ in range(len(ring.links[2])):
        ring.deliver(2)

    failures = [said for each in ring.said for said in each if isinstance(said, ExchangeFailed)]
    assert [(each.kind, each.rank) for each in failures] == [("NON_FINITE_GRADIENT", 1)]


def test_a_sum_of_finite_numbers_that_is_not_finite_is_a_non_finite_average() -> None:
    # Of the shares 0.1, 0.8 and 0.1, rounded to float32, more are rounded up than down.
    blocks = [[np.full(9, np.finfo(np.float32).max)] for _ in range(3)]
    ring = Ring([9], [1.0, 8.0, 1.0], FLOAT32)

    ring.run(blocks, 0)

    kinds = {said.kind for each in ring.said for said in each if isinstance(said, ExchangeFailed)}
    assert kinds == {"NON_FINITE_AVERAGE"}
    assert not any(isinstance(said, AveragesComplete) for each in ring.said for said in each)


def test_a_mean_beyond_the_answers_encoding_is_an_overflow() -> None:
    policy = Policy(chunk_elements=3, encoding=Encoding.FLOAT32, answer_encoding=Encoding.FLOAT16)
    blocks = [[np.full(4, 1e6, np.float32)] for _ in range(2)]
    ring = Ring([4], [1.0, 1.0], policy)

    ring.run(blocks, 0)

    kinds = {said.kind for each in ring.said for said in each if isinstance(said, ExchangeFailed)}
    assert kinds == {"ENCODING_OVERFLOW"}


def flip(ring: Ring, link: int) -> None:
    """Changes one bit of the oldest chunk's numbers on a link."""
    data = bytearray(ring.links[link].popleft())
    data[-14] ^= 1  # Both checksums, ten bytes, follow the numbers.
    ring.links[link].appendleft(bytes(data))


@pytest.mark.parametrize("who", ["adds to it", "passes it on"])
def test_a_chunk_that_was_changed_on_its_way_is_traced_to_its_link(who: str) -> None:
    # Rank 2 has a weight, or abstains.
    ring = begun(weights=[1.0, 1.0, float(who == "adds to it")], checked=[True] * 3)
    ring.do(1, ring.rounds[1].submit(0, np.ones(9, np.float32)))
    flip(ring, 1)

    ring.deliver(1)

    (failed,) = ring.said[2]
    assert isinstance(failed, ExchangeFailed)
    found = (failed.kind, failed.rank, failed.block, failed.element)
    assert found == ("CORRUPT_CHUNK", 1, 0, 3)
    assert "from rank 1 to rank 2" in failed.message
    assert not ring.links[2], "nothing of it goes on"


def test_a_chunk_without_a_checksum_is_refused_once_all_said_that_they_make_them() -> None:
    ring, message = begun(checked=[True] * 3), chunk()

    with pytest.raises(RingViolation, match="without a checksum"):
        ring.rounds[2].receive(Arrived(message, b"", 0))


def test_ranks_with_and_without_checksums_are_on_one_ring() -> None:
    blocks = ones(3, 9)
    ring = Ring([9], [1.0] * 3, FLOAT32, checked=[True, False, True])

    ring.run(blocks, 0)

    for rank in range(3):
        assert [type(said) for said in ring.said[rank]] == [AveragesComplete]
        np.testing.assert_allclose(ring.rounds[rank].averages[0], 1.0)


def test_nothing_is_sent_after_a_fault() -> None:
    ring = begun()
    ring.do(2, ring.rounds[2].submit(0, np.ones(9, np.float32)))
    ring.do(1, ring.rounds[1].submit(0, np.ones(9, np.float32)))
    poison(ring, 1, float("nan"))
    ring.deliver(1)
    ring.do(0, ring.rounds[0].submit(0, np.ones(9, np.float32)))
    before = len(ring.links[2])

    while ring.links[1]:
        ring.deliver(1)

    assert len(ring.links[2]) == before


def test_ranks_that_call_different_things_are_told_so() -> None:
    calls = [Call(name="all_reduce_gradients", blocks=range(1)), Call(name="barrier")]
    ring = Ring([4], [1.0, 0.0], FLOAT32, calls)

    ring.run(ones(2, 4), 0)

    for said in ring.said:
        (failed,) = said
        assert isinstance(failed, ExchangeFailed)
        assert failed.kind == "PROTOCOL"
        assert "same calls in the same order" in failed.message


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_can_not_be_is_refused(weight: float) -> None:
    ring = Ring([4], [1.0, weight], FLOAT32)

    ring.run(ones(2, 4), 0)

    assert all(
        isinstance(said, ExchangeFailed) and said.kind == "PROTOCOL"
        for each in ring.said
        for said in each
    )
    assert all(ring.said)


def chunk(**fields: object) -> RingChunk:
    """What rank 2 may get of segment 1 of `begun`, or something else."""
    given: dict[str, object] = {
        "key": KEY,
        "stage": RingStage.CONTRIBUTION,
        "block": 0,
        "offset": 3,
        "count": 3,
        "payload": memoryview(bytes(12)),
        **fields,
    }
    return RingChunk(**given)  # type: ignore[arg-type]  # fields of a test


FORBIDDEN: dict[str, Callable[[], RingHeader | RingChunk]] = {
    "no block of the exchange": lambda: chunk(block=7),
    "no segment of the block": lambda: chunk(offset=4),
    "another count": lambda: chunk(count=2, payload=memoryview(bytes(8))),
    "another encoding": lambda: chunk(encoding=Encoding.FLOAT16, payload=memoryview(bytes(6))),
    "a sum of one": lambda: chunk(stage=RingStage.PARTIAL_SUM),
    "a segment that starts here": lambda: chunk(offset=6),
    "a contribution that went by another rank": lambda: chunk(offset=0),
    "a mean that needs this rank": lambda: chunk(stage=RingStage.AVERAGE),
    "bytes of no broadcast": lambda: chunk(
        stage=RingStage.BROADCAST, encoding=Encoding.UINT8, payload=memoryview(bytes(3))
    ),
    "terms again": lambda: RingHeader(
        key=KEY, rank=0, weight=1.0, operation=Operation.WEIGHTED_MEAN, stop_block=1
    ),
    "terms of nobody": lambda: RingHeader(
        key=KEY, rank=3, weight=1.0, operation=Operation.WEIGHTED_MEAN, stop_block=1
    ),
    "another exchange": lambda: chunk(sequence=1),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_c_wire_002_what_can_not_be_is_refused(what: str) -> None:
    message = FORBIDDEN[what]()

    with pytest.raises(RingViolation):
        begun().rounds[2].receive(Arrived(message, b"", 0))


def test_a_chunk_that_comes_twice_is_refused() -> None:
    round_, message = begun().rounds[2], chunk()
    round_.receive(Arrived(message, b"", 0))

    with pytest.raises(RingViolation, match="came before"):
        round_.receive(Arrived(message, b"", 0))


def test_a_chunk_before_all_terms_is_refused() -> None:
    ring = Ring([9], [1.0] * 3, FLOAT32)
    ring.rounds[2].begin()
    message = chunk()

    with pytest.raises(RingViolation, match="before the headers"):
        ring.rounds[2].receive(Arrived(message, b"", 0))
