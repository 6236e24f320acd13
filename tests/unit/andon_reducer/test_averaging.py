"""Deliveries: a long job is several parts, and one answer or one fault comes of it."""

from __future__ import annotations

import asyncio
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from andon.host.arena import CAPABILITY, ArenaLayout, folder_identity, map_offer
from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    BlockGradient,
    OpenRound,
    Operation,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
)
from andon.protocol.records import Key
from andon.wire.frames import parse_response
from andon_reducer.core import jobs
from andon_reducer.core.jobs import Job
from andon_reducer.transport import averaging
from andon_reducer.transport.arenas import Arenas, StreamMemory
from andon_reducer.transport.averaging import AveragingThreads, Delivery
from andon_reducer.transport.loop_calls import LoopCalls

PLACES = ArenaLayout((100,))
OFFSET, COUNT = 3, 90


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PIECE_ELEMENTS", 20)


@pytest.fixture
def memory(tmp_path: Path) -> StreamMemory:
    asked = OpenRound("run", 0, b"", (CAPABILITY,), PLACES.elements, folder_identity(tmp_path))
    memory = asyncio.run(Arenas(tmp_path).open(asked))
    assert isinstance(memory, StreamMemory)
    offer = memory.offered(RoundOpened((), 1))
    assert offer.contributions is not None
    assert offer.averages is not None
    nonces = [
        map_offer(tmp_path, each, PLACES, writable=False)[1]
        for each in (offer.contributions, offer.averages)
    ]
    memory.prove(SharedMemoryMapped(*nonces))
    return memory


def job_of(*vectors: npt.NDArray[np.float32], in_place: bool = True) -> Job:
    return Job(
        id=1,
        key=Key(1, 1),
        group=0,
        sequence=0,
        operation=Operation.WEIGHTED_MEAN,
        world_size=len(vectors),
        block=0,
        offset=OFFSET,
        count=COUNT,
        encoding=Encoding.FLOAT32,
        answer_encoding=Encoding.FLOAT32,
        contributions=tuple(
            BlockGradient(
                key=Key(1, 1),
                rank=rank,
                world_size=len(vectors),
                block=0,
                offset=OFFSET,
                count=COUNT,
                weight=1.0,
                payload=vector.view(np.uint8).data,
            )
            for rank, vector in enumerate(vectors)
        ),
        to_memory=True,
        in_place=in_place,
    )


def numbers() -> list[npt.NDArray[np.float32]]:
    return [np.random.default_rng(seed).standard_normal(COUNT, np.float32) for seed in (1, 2)]


def work(delivery: Delivery) -> list[bool]:
    """Does the parts in an order drawn at random."""
    parts = list(delivery.parts)
    random.Random(5).shuffle(parts)
    return [delivery.reduce(part) for part in parts]


def test_the_last_of_five_parts_makes_the_one_message(memory: StreamMemory) -> None:
    one, two = numbers()
    delivery = Delivery(job_of(one, two), {7: memory, 8: memory})

    assert work(delivery) == [False] * 4 + [True]

    at = PLACES.starts[0] + 4 * OFFSET
    found = np.frombuffer(memory.averages.file.memory, np.float32, COUNT, at)
    half = np.float32(0.5)
    assert found.tobytes() == (half * one + half * two).tobytes()
    message = delivery.message_for(8)
    answer = parse_response(message.frame)
    assert isinstance(answer, AveragedBlock)
    assert (answer.offset, answer.count, answer.total_weight) == (OFFSET, COUNT, 2.0)
    assert answer.slice is not None
    assert (answer.slice.offset, answer.slice.length) == (at, message.shared_bytes)
    assert message.shared_bytes == 4 * COUNT


def test_of_several_faults_the_one_at_the_lowest_element_counts(memory: StreamMemory) -> None:
    one, two = numbers()
    one[71], two[33] = np.nan, np.inf
    delivery = Delivery(job_of(one, two), {7: memory})

    assert work(delivery).count(True) == 1

    assert isinstance(delivery.fault, BlockFault)
    assert (delivery.fault.element, delivery.fault.rank) == (OFFSET + 33, 1)


def test_a_part_that_raises_does_not_end_the_job_before_the_others_are_done(
    memory: StreamMemory,
) -> None:
    delivery = Delivery(job_of(*numbers()), {7: memory})
    _, *others = delivery.parts
    error = MemoryError("no scratch")

    assert not delivery.fail(error)
    assert [delivery.reduce(part) for part in others] == [False] * 3 + [True]
    assert delivery.failure is error


def test_what_leaves_as_bytes_too_is_one_part(memory: StreamMemory) -> None:
    delivery = Delivery(job_of(*numbers(), in_place=False), {7: memory, 8: None})

    assert work(delivery) == [True]

    message = delivery.message_for(8)
    answer = parse_response(message.frame)
    assert isinstance(answer, AveragedBlock)
    assert (answer.payload.nbytes, message.shared_bytes) == (4 * COUNT, 0)


def test_what_a_listener_gets_on_a_lane_outlasts_the_exchange(memory: StreamMemory) -> None:
    one, two = numbers()
    delivery = Delivery(
        job_of(one, two, in_place=False), {7: memory, 8: None}, lanes=[8], lasting=True
    )
    work(delivery)
    average = (np.float32(0.5) * one + np.float32(0.5) * two).tobytes()

    at = PLACES.starts[0] + 4 * OFFSET
    written = np.frombuffer(memory.averages.file.memory, np.uint8, 4 * COUNT, at)
    assert written.tobytes() == average
    written[:] = 0

    payload = delivery.message_for(8).payload
    assert payload is not None
    assert bytes(payload) == average


def test_what_a_lone_rank_gave_in_memory_is_copied_for_a_listener_on_a_lane() -> None:
    one, _ = numbers()
    job = job_of(one.copy(), in_place=False)
    (part,) = job.contributions
    part = replace(part, slice=Slice(0, 4 * COUNT, 1))
    delivery = Delivery(
        replace(job, contributions=(part,), to_memory=False), {8: None}, lanes=[8], lasting=True
    )
    work(delivery)

    np.frombuffer(part.payload, np.float32)[:] = 0

    payload = delivery.message_for(8).payload
    assert payload is not None
    assert bytes(payload) == one.tobytes()


def test_a_delivery_is_freed_without_the_cycle_collector(memory: StreamMemory) -> None:
    delivery = Delivery(job_of(*numbers()), {7: memory})
    gone = weakref.ref(delivery)
    work(delivery)

    del delivery

    assert gone() is None, "what a job holds is freed with it"


def test_the_threads_say_how_long_they_have_computed() -> None:
    async def computed() -> tuple[float, float]:
        done = asyncio.Event()
        threads = AveragingThreads(2, lambda delivery: done.set(), LoopCalls())
        before = threads.busy_s
        threads.do(Delivery(job_of(*numbers()), {1: None}))
        await done.wait()
        threads.close()
        return before, threads.busy_s

    before, after = asyncio.run(computed())

    assert before == 0.0
    assert after > 0.0


@pytest.mark.parametrize(("quick", "done"), [(2 * COUNT, True), (2 * COUNT - 1, False)])
def test_a_delivery_of_few_elements_is_done_at_once(
    quick: int, *, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "QUICK_ELEMENTS", quick)
    one, two = numbers()
    delivery = Delivery(job_of(one, two), {1: None})
    threads = AveragingThreads(1, lambda delivery: pytest.fail("it went to a thread"), LoopCalls())

    at_once = threads.do_now(delivery)
    threads.close()

    assert at_once is done
    if done:
        answer = parse_response(delivery.message_for(1).frame)
        assert isinstance(answer, AveragedBlock)
        assert np.frombuffer(answer.payload, np.float32) == pytest.approx((one + two) / 2)
        assert threads.busy_s > 0.0


def test_a_delivery_that_raises_at_once_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery(job_of(*numbers()), {1: None})
    threads = AveragingThreads(1, lambda delivery: None, LoopCalls())

    def raises(*_: object) -> bool:
        raise RuntimeError("made up")

    monkeypatch.setattr(delivery, "reduce", raises)

    assert threads.do_now(delivery)
    threads.close()
    assert isinstance(delivery.failure, RuntimeError)
