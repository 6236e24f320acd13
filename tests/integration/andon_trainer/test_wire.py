"""A worker's exchange with a real reducer, when rounds are void."""

from __future__ import annotations

import time

import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Policy
from andon.wire import checksums
from andon_reducer.config import ReducerConfig
from andon_trainer.core.calls import Floats
from andon_trainer.core.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.star.reducer_path import ReducerUnfit
from andon_trainer.exchange.star.star import StarExchange
from integration.flipping import FlippingRelay, in_run_of
from integration.reducer_bench import RUN, SECRET, Reducer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

CHUNK = 2**12
LAYOUT = Layout((Block(BlockKind.OTHER, "b", (Component("w", (64 * CHUNK,)),)),))
WINDOW_BYTES = 16 * 4 * CHUNK
PATIENCE_S = 20.0
POLICY = Policy(chunk_elements=CHUNK)


class Worker:
    """One worker's exchange, without a coordinator."""

    def __init__(
        self, reducer: Reducer, worker: int, policy: Policy = POLICY, *, by: str = ""
    ) -> None:
        """`by` is the address of a relay to the reducer, if one is used."""
        self.inbox = Inbox()
        self.exchange = StarExchange(LAYOUT, policy, self.inbox)
        self._address = by or f"127.0.0.1:{reducer.port}"
        token = tokens.session_token(SECRET, RUN, worker)
        self._opening = OpenRound(RUN, worker, token, (checksums.CAPABILITY,))
        self.open()

    def open(self) -> None:
        """Opens the streams, as the membership does before a round."""
        if not self.exchange.is_open:
            self.exchange.open(self._address, self._opening)

    def give(
        self, round_number: int, rank: int, world_size: int, flat: Floats | None = None
    ) -> None:
        """Submits the whole block to a round; by default, each element is the rank's own number."""
        self.open()
        assigned = Assigned(
            key=Key(1, round_number),
            parent=None,
            roster=tuple(range(world_size)),
            rank=rank,
            step=1,
            attempt=0,
            epoch=0,
            positions=(PositionRange(rank, rank + 1),),
            batch=PositionRange(0, world_size),
        )
        self.exchange.begin(assigned, 1.0)
        same = np.full(64 * CHUNK, rank + 1.0, dtype=np.float32)
        self.exchange.submit(0, same if flat is None else flat)

    def has_averages(self, round_number: int) -> bool:
        """Whether the averages arrive; ignores reports about older rounds."""
        while (event := self.inbox.take(PATIENCE_S)) is not None:
            if getattr(event, "key", None) == Key(1, round_number):
                return isinstance(event, AveragesComplete)
        return False


def test_blocks_of_a_void_round_do_not_stand_in_the_next_ones_way() -> None:
    # The model is larger than the window, and a rank died before it sent anything.
    with Reducer(ReducerConfig(window_bytes=WINDOW_BYTES)) as reducer:
        workers = [Worker(reducer, number) for number in range(3)]
        for rank in range(2):
            workers[rank].give(1, rank, 3)
        give_up_at = time.monotonic() + PATIENCE_S
        while reducer.app.inflight_bytes < WINDOW_BYTES and time.monotonic() < give_up_at:
            time.sleep(0.001)
        workers[2].exchange.close()
        for worker in workers[:2]:
            worker.exchange.end()

        for rank in range(2):
            workers[rank].give(2, rank, 2)

        assert [worker.has_averages(2) for worker in workers[:2]] == [True, True]
        np.testing.assert_array_equal(workers[0].exchange.averages[0], np.float32(1.5))
        for worker in workers[:2]:
            worker.exchange.close()


def test_a_round_that_was_void_after_its_averages_keeps_the_stream() -> None:
    with Reducer(ReducerConfig(window_bytes=WINDOW_BYTES)) as reducer:
        worker = Worker(reducer, 0)
        worker.give(1, 0, 1)
        assert worker.has_averages(1)

        worker.exchange.end()

        assert worker.exchange.is_open
        worker.exchange.close()


@pytest.mark.parametrize("answer", [None, Encoding.FLOAT32])
@pytest.mark.parametrize(
    "encoding", [Encoding.FLOAT16, Encoding.BFLOAT16, Encoding.INT8_BLOCK, Encoding.INT4_BLOCK]
)
def test_narrow_gradients_are_averaged_in_float32_and_come_back_as_asked(
    encoding: Encoding, answer: Encoding | None
) -> None:
    policy = Policy(chunk_elements=CHUNK, encoding=encoding, answer_encoding=answer)
    given = np.random.default_rng(5).standard_normal((2, 64 * CHUNK)).astype(np.float32)

    with Reducer() as reducer:
        workers = [Worker(reducer, number, policy) for number in range(2)]
        for rank, worker in enumerate(workers):
            worker.give(1, rank, 2, given[rank])
        whole = [worker.has_averages(1) for worker in workers]
        means = [worker.exchange.averages[0].copy() for worker in workers]
        sent = workers[0].exchange.traffic.sent["wire"]
        for worker in workers:
            worker.exchange.close()

    half, size = np.float32(0.5), given[0].size
    first, second = (decode(encode(each, encoding), encoding, size) for each in given)
    exact = first * half + second * half
    expected = exact if answer else decode(encode(exact, encoding), encoding, size)
    assert whole == [True, True]
    assert means[0].tobytes() == means[1].tobytes() == expected.tobytes()
    assert 1 < sent / encoding.payload_bytes(size) < 1.1


def test_a_reducer_that_lacks_the_lines_encoding_is_refused_by_the_capabilitys_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(chunk_elements=CHUNK, encoding=Encoding.INT4_BLOCK)
    monkeypatch.setattr("andon_reducer.transport.reduce.CAPABILITIES", ("int8.v1",))

    with Reducer() as reducer, pytest.raises(ReducerUnfit, match=r"lacks int4\.v1, which the line"):
        Worker(reducer, 0, policy)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_bit_that_flips_on_the_wire_voids_the_round_and_the_next_one_is_right(
    direction: str,
) -> None:
    # Rank 1 sends 2.0 everywhere, and gets 1.5.
    number = np.float32(2.0 if direction == "up" else 1.5).tobytes()
    with (
        Reducer() as reducer,
        FlippingRelay(f"127.0.0.1:{reducer.port}", direction, in_run_of(number)) as relay,
    ):
        workers = [Worker(reducer, 0), Worker(reducer, 1, by=relay.address)]
        for rank, worker in enumerate(workers):
            worker.give(1, rank, 2)

        told = workers[1].inbox.take(PATIENCE_S)
        for worker in workers:
            worker.exchange.end()
        for rank, worker in enumerate(workers):
            worker.give(2, rank, 2)
        whole = [worker.has_averages(2) for worker in workers]
        means = [worker.exchange.averages[0].copy() for worker in workers]
        for worker in workers:
            worker.exchange.close()

    assert relay.flipped == 1
    assert isinstance(told, ExchangeFailed), "what was changed was averaged"
    assert (told.kind, told.rank, told.block) == ("CORRUPT_CHUNK", 1, 0)
    assert whole == [True, True]
    for mean in means:
        np.testing.assert_array_equal(mean, np.float32(1.5))
