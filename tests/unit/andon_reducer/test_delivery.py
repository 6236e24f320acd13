"""Deliveries: a long job is several pieces, and one answer or one fault comes of it."""

from __future__ import annotations

import asyncio
import random
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from andon.host.arena import CAPABILITY, ArenaLayout, folder_identity, map_offer
from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    AveragedBlock,
    BlockFault,
    OpenRound,
    Operation,
    RoundOpened,
    SharedMemoryMapped,
)
from andon.protocol.records import Key
from andon.wire.frames import parse_response
from andon_reducer.core import jobs
from andon_reducer.core.jobs import Job
from andon_reducer.core.mean import Contribution
from andon_reducer.transport.arenas import Arenas, Session
from andon_reducer.transport.delivery import Delivery

PLACES = ArenaLayout((100,))
OFFSET, COUNT = 3, 90


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PIECE_ELEMENTS", 20)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    asked = OpenRound("run", 0, b"", (CAPABILITY,), PLACES.elements, folder_identity(tmp_path))
    session = asyncio.run(Arenas(tmp_path).open(asked))
    assert isinstance(session, Session)
    offer = session.offered(RoundOpened((), 1))
    assert offer.contributions is not None
    assert offer.averages is not None
    nonces = [
        map_offer(tmp_path, each, PLACES, writable=False)[1]
        for each in (offer.contributions, offer.averages)
    ]
    session.prove(SharedMemoryMapped(*nonces))
    return session


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
            Contribution(rank, 1.0, vector.view(np.uint8).data)
            for rank, vector in enumerate(vectors)
        ),
        to_memory=True,
        in_place=in_place,
    )


def numbers() -> list[npt.NDArray[np.float32]]:
    return [np.random.default_rng(seed).standard_normal(COUNT, np.float32) for seed in (1, 2)]


def work(delivery: Delivery) -> list[bool]:
    """Has the pieces worked on, in an order of no account."""
    pieces = list(delivery.pieces())
    random.Random(5).shuffle(pieces)
    return [piece.work() for piece in pieces]


def test_the_last_of_five_pieces_makes_the_one_message(session: Session) -> None:
    one, two = numbers()
    delivery = Delivery(job_of(one, two), {7: session, 8: session})

    assert work(delivery) == [False] * 4 + [True]

    at = PLACES.starts[0] + 4 * OFFSET
    found = np.frombuffer(session.averages.file.memory, np.float32, COUNT, at)
    half = np.float32(0.5)
    assert found.tobytes() == (half * one + half * two).tobytes()
    frame, shared_bytes = delivery.frame_for(8)
    answer = parse_response(frame)
    assert isinstance(answer, AveragedBlock)
    assert (answer.offset, answer.count, answer.total_weight) == (OFFSET, COUNT, 2.0)
    assert answer.slice is not None
    assert (answer.slice.offset, answer.slice.length) == (at, shared_bytes) == (at, 4 * COUNT)


def test_of_several_faults_the_lowest_element_is_told(session: Session) -> None:
    one, two = numbers()
    one[71], two[33] = np.nan, np.inf
    delivery = Delivery(job_of(one, two), {7: session})

    assert work(delivery).count(True) == 1

    assert isinstance(delivery.fault, BlockFault)
    assert (delivery.fault.element, delivery.fault.rank) == (OFFSET + 33, 1)


def test_a_piece_that_raises_does_not_end_the_job_before_the_others_are_done(
    session: Session,
) -> None:
    delivery = Delivery(job_of(*numbers()), {7: session})
    first, *others = delivery.pieces()
    error = MemoryError("no scratch")

    assert not first.fail(error)
    assert [piece.work() for piece in others] == [False] * 3 + [True]
    assert delivery.failure is error


def test_what_leaves_as_bytes_too_is_one_piece(session: Session) -> None:
    delivery = Delivery(job_of(*numbers(), in_place=False), {7: session, 8: None})

    assert work(delivery) == [True]

    frame, shared_bytes = delivery.frame_for(8)
    answer = parse_response(frame)
    assert isinstance(answer, AveragedBlock)
    assert (answer.payload.nbytes, shared_bytes) == (4 * COUNT, 0)


def test_nothing_waits_for_the_collector_of_cycles(session: Session) -> None:
    delivery = Delivery(job_of(*numbers()), {7: session})
    gone = weakref.ref(delivery)
    work(delivery)

    del delivery

    assert gone() is None, "what a job holds is freed with it"
