"""Models above 2 GiB, in one tensor and in total: no length is stored in 31 bits.

Each test takes up to 12 GiB of memory and at least a minute, so only `make soak` runs them, with
ANDON_LARGE=1.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Policy
from andon.wire import checksums
from andon_reducer.config import ReducerConfig
from andon_trainer.core.calls import Floats
from andon_trainer.core.events import Assigned, AveragesComplete
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.transfer import PartialState, Ticket, receive_state, send_state
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.star import StarExchange
from integration.andon_trainer.ring_workers import RingLine
from integration.harness import Service, on_line, start_worker
from integration.reducer_bench import RUN, SECRET, Reducer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.environ.get("ANDON_LARGE") != "1",
        reason="needs 12 GiB of memory and minutes: `make soak` runs it, with ANDON_LARGE=1",
    ),
]

ELEMENTS = 2**29 + 2**20 + 7
"""Elements of float32: 2 GiB, 4 MiB and a little more."""
LAYOUTS = {
    "one tensor": (ELEMENTS,),
    "three tensors": (ELEMENTS // 3, 5, ELEMENTS - 5 - ELEMENTS // 3),
}
WEIGHTS = (1.0, 3.0)
PATIENCE_S = 1200.0
KEY = Key(1, 1)
PERIOD = 2**20 - 3
"""No chunk's length is a multiple of it, so a chunk in the wrong place has wrong values."""


def layout_of(name: str) -> Layout:
    return Layout(
        tuple(
            Block(BlockKind.OTHER, f"b{number}", (Component(f"w{number}", (size,)),))
            for number, size in enumerate(LAYOUTS[name])
        )
    )


def filled(blocks: list[Floats]) -> list[Floats]:
    """Each block's numbers, for both ranks; memory holds them once."""
    row = np.arange(PERIOD, dtype=np.float32) / 64
    for block in blocks:
        for start in range(0, block.size, PERIOD):
            part = block[start : start + PERIOD]
            part[:] = row[: part.size]
    return blocks


def gradients(layout: Layout) -> list[Floats]:
    """Each block's numbers in separate memory."""
    return filled([np.empty(block.elements, np.float32) for block in layout.blocks])


def lent(exchange: StarExchange, layout: Layout) -> list[Floats]:
    """The same, in the memory that the reducer reads."""
    found = [exchange.lend(block) for block in range(len(layout.blocks))]
    return filled([each[0] for each in found if each is not None])


def assert_right(averages: list[Floats], given: list[Floats]) -> None:
    """Checks the mean: equal contributions with power-of-two weights average to themselves."""
    for average, block in zip(averages, given, strict=True):
        assert np.array_equal(average, block)


def assigned_to(rank: int) -> Assigned:
    return Assigned(
        key=KEY,
        parent=None,
        roster=(0, 1),
        rank=rank,
        step=1,
        attempt=0,
        epoch=0,
        positions=(PositionRange(rank, rank + 1),),
        batch=PositionRange(0, 2),
    )


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    with Reducer(ReducerConfig(shared_dir=Path("/dev/shm"))) as reducer:
        yield reducer


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("path", ["wire", "shared-memory"])
def test_two_ranks_exchange_more_than_2_gib_through_a_reducer(
    path: str, name: str, reducer: Reducer
) -> None:
    layout, policy = layout_of(name), Policy()
    inboxes = [Inbox(), Inbox()]
    access = ReducerAccess(shared_dir=None if path == "wire" else Path("/dev/shm"))
    exchanges = [StarExchange(layout, policy, inbox, (), access) for inbox in inboxes]
    for rank, exchange in enumerate(exchanges):
        token = tokens.session_token(SECRET, RUN, rank)
        exchange.open(
            f"127.0.0.1:{reducer.port}",
            OpenRound(RUN, rank, token, (checksums.CAPABILITY,)),
        )
        exchange.begin(assigned_to(rank), WEIGHTS[rank])
    first = exchanges[0]
    given = gradients(layout) if path == "wire" else lent(first, layout)

    for block, flat in enumerate(given):
        for exchange in exchanges:
            exchange.submit(block, flat)
    told = [inbox.take(PATIENCE_S) for inbox in inboxes]

    assert told == [AveragesComplete(KEY, sum(WEIGHTS), 2)] * 2
    for exchange in exchanges:
        assert_right(exchange.averages, given)
        assert sum(exchange.traffic.sent.values()) >= 4 * ELEMENTS
        exchange.close()


def test_two_ranks_exchange_more_than_2_gib_around_a_ring() -> None:
    layout = layout_of("one tensor")
    given = gradients(layout)
    with RingLine(layout, Policy(), 2) as line:
        for rank in range(2):
            line.give(KEY, rank, (0, 1), given, WEIGHTS[rank])

        for worker in line.workers:
            told = worker.inbox.take(PATIENCE_S)
            assert told == AveragesComplete(KEY, sum(WEIGHTS), 2)
            assert_right(worker.exchange.averages, given)


def test_a_state_above_2_gib_arrives_whole(reducer: Reducer) -> None:
    state = bytes(4 * ELEMENTS)
    tickets = [
        Ticket(
            address=f"127.0.0.1:{reducer.port}",
            run_id=RUN,
            worker=worker,
            session_token=tokens.session_token(SECRET, RUN, worker),
            transfer_id=1,
            head=KEY,
        )
        for worker in range(2)
    ]
    sender = threading.Thread(
        target=send_state,
        args=(tickets[0], PackedState([state]), lambda *_: None, lambda _: None),
        daemon=True,
    )
    sender.start()

    arrived = receive_state(tickets[1], PartialState(), lambda *_: None, lambda _: None)

    sender.join(PATIENCE_S)
    assert len(arrived) == len(state)
    assert hashlib.sha256(arrived).digest() == hashlib.sha256(state).digest()


@pytest.mark.parametrize("shared_dir", ["off", "/dev/shm"])
def test_a_parameter_above_2_gib_is_trained_digested_and_committed(
    tmp_path: Path, shared_dir: str
) -> None:
    spec = {"rows": 2**9 + 1, "steps": 2}
    with Service(tmp_path / "run", 1, "--digest-every", "1", shared_dir=shared_dir) as service:
        where = on_line(service, 0, 1)
        worker = start_worker(
            tmp_path, spec, slot=0, script="huge.py", ANDON_SHARED_DIR=shared_dir, **where
        )
        code = worker.process.wait(PATIENCE_S)
        worker.output = worker.process.output.read_text()

    assert code == 0, worker.output
    assert worker.seen["elements"] > 2**29
    assert (worker.seen["step"], worker.seen["wrong"]) == (2, 0)
    assert worker.seen["bias"] == [-1.0] * 3
    # The parameter and its gradient; on the wire, also the sent and the received numbers.
    assert worker.seen["peak_kib"] < (4 * 2 + 1.5) * 2**20
