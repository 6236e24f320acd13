"""No message that can be read ends the reducer's core, its arithmetic or its relay, or fills its
memory: chunks and abstentions, then the pieces of a state."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from andon.protocol import tokens
from andon.protocol.encoding import Encoding
from andon.protocol.messages import Abstain, BlockGradient, TreeNode
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire.checksums import crc32c_of
from andon.wire.frames import frame_request
from andon_reducer.config import ReducerConfig
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.disagreement import Disagreement
from andon_reducer.core.exchange import OVERHEAD_BYTES, RANGE_BYTES, FinishedRanges
from andon_reducer.core.round import MAX_REMEMBERED_BYTES, ReducerRound
from andon_reducer.core.rounds import Rounds
from andon_reducer.core.stream import ChunkLimits, StreamState
from andon_reducer.telemetry import ReducerTelemetry
from andon_reducer.transport.admission import CallRefused, SessionTokens
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.relay import Relay
from andon_reducer.transport.state import StateServicer
from scenarios.implausible import changed
from scenarios.line_port import held_bytes
from scenarios.reducer_port import STREAMS, WINDOW_BYTES, ReducerPort
from unit.andon.strategies import BOUNDED

MESSAGE_BYTES = 6000
MOST_HELD_BYTES = 2**18
"""Two windows, a few messages a stream, and 300 remembered ranges."""
KEY = Key(5, 7)


def chunk(**more: Any) -> BlockGradient:
    fields: dict[str, Any] = {
        "key": KEY,
        "rank": 0,
        "world_size": 2,
        "block": 0,
        "offset": 0,
        "count": 2,
        "weight": 1.0,
        "payload": memoryview(bytes(8)),
    }
    return BlockGradient(**{**fields, **more})


def message_of(request: BlockGradient | Abstain) -> Any:
    return reducer_pb2.ReduceRequest.FromString(frame_request(request))


@BOUNDED
@given(st.data())
def test_no_readable_message_ends_the_reducer_or_fills_its_memory(data: st.DataObject) -> None:
    reducer = ReducerPort()
    for _ in range(data.draw(st.integers(1, 12))):
        worker, size = data.draw(st.integers(0, STREAMS - 1)), data.draw(st.sampled_from([1, 2]))
        key = data.draw(st.sampled_from([KEY, KEY, KEY, Key(5, 6), Key(5, 8)]))
        rank = min(worker, size - 1)
        request = data.draw(
            st.sampled_from(
                [
                    message_of(chunk(key=key, rank=rank, world_size=size)),
                    message_of(
                        chunk(key=key, rank=rank, world_size=size, node=TreeNode(rank, 1, size, 2))
                    ),
                    message_of(Abstain(key=key, rank=rank, world_size=size)),
                ]
            )
        )
        content = getattr(request, request.WhichOneof("message"))
        changed(data, content)
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 1, 1, 60]))):
            reducer.take(worker, request.SerializeToString())
            if request.HasField("block_gradient"):
                content.element_offset = (content.element_offset + content.element_count) % 2**64
    messages = STREAMS * 2 * (MESSAGE_BYTES + OVERHEAD_BYTES)
    assert reducer.rounds.inflight_bytes <= 2 * WINDOW_BYTES + messages
    assert held_bytes(reducer.rounds) < MOST_HELD_BYTES


def test_chunks_in_order_are_remembered_as_one_range() -> None:
    reducer = ReducerPort()

    for offset in range(0, 2000, 2):
        reducer.take(0, frame_request(chunk(world_size=1, offset=offset)))

    assert not reducer.refusals
    assert held_bytes(reducer.rounds) < 2**15


def test_a_made_up_term_ends_its_stream_and_keeps_nobody_out() -> None:
    rounds = Rounds(window_bytes=WINDOW_BYTES, max_payload_bytes=WINDOW_BYTES)
    for worker in (1, 2):
        rounds.receive(on.ReduceStreamOpened(worker, "run", worker, KEY.term), 0.0)

    made_up = chunk(key=Key(KEY.term + 1, 1), world_size=1)
    (refused,) = rounds.receive(on.GradientArrived(1, made_up), 0.0)
    rounds.receive(on.ReduceStreamEnded(1), 0.0)
    (reduced,) = rounds.receive(on.GradientArrived(2, chunk(world_size=1)), 0.0)

    assert isinstance(refused, do.RefuseStream)
    assert refused.refusal.reason is Reason.INVALID_MESSAGE
    assert isinstance(reduced, do.Reduce)


def test_a_list_of_elements_that_contradicts_itself_ends_its_stream() -> None:
    falls = bytes.fromhex("02000100803f803f")
    sound = bytes.fromhex("02000001803f803f")

    def refused(payload: bytes, **more: Any) -> Reason | None:
        reducer = ReducerPort()
        message = chunk(payload=memoryview(payload), encoding=Encoding.TOPK, **more)
        reducer.take(0, frame_request(message, checksums=True))
        return reducer.refusals[0].reason if reducer.refusals else None

    assert refused(sound) is None
    assert refused(falls) is Reason.INVALID_MESSAGE
    assert refused(bytes(2 * 2**16), count=2**24) is Reason.TOO_LARGE
    assert refused(sound, answer_encoding=Encoding.INT2_BLOCK) is Reason.NOT_OFFERED


def test_a_list_that_the_network_changed_is_no_fault_of_its_worker() -> None:
    sent = chunk(payload=memoryview(bytes.fromhex("02000001803f803f")), encoding=Encoding.TOPK)
    changed_one = replace(
        sent, payload=memoryview(bytes.fromhex("02000101803f803f")), crc32c=crc32c_of(sent)
    )

    limits = ChunkLimits(max_payload_bytes=WINDOW_BYTES)

    assert StreamState(1, 1).refusal(changed_one, limits) is None
    assert StreamState(1, 1).refusal(replace(changed_one, crc32c=None), limits) is not None


def test_what_is_remembered_of_finished_chunks_counts_against_the_reducers_memory() -> None:
    reducer = ReducerPort(max_held_bytes=2**16)

    for offset in range(0, 2000, 4):
        reducer.take(0, frame_request(chunk(world_size=1, offset=offset)))

    assert {each.reason for each in reducer.refusals} == {Reason.MEMORY_LIMIT}
    assert reducer.rounds.inflight_bytes < 2**16


def test_a_round_remembers_no_more_than_a_model_can_need() -> None:
    round_ = ReducerRound(KEY, remembered_bytes=MAX_REMEMBERED_BYTES + RANGE_BYTES)

    with pytest.raises(Disagreement, match="too many gaps between its chunks"):
        round_.contribute(StreamState(1, 0), chunk(), 0.0)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_chunk_that_overlaps_a_finished_one_came_twice(offset: int) -> None:
    reducer = ReducerPort()
    for worker in (0, 1):
        payload = memoryview(bytes(16))
        first = chunk(rank=worker, count=4, payload=payload)
        reducer.take(worker, frame_request(first))

    stream = reducer.rounds._by_stream[1]
    other = on.ReduceStreamOpened(99, "run", 0)
    reducer.rounds.receive(other, 0.0)
    effects = reducer.rounds.receive(on.GradientArrived(99, chunk(offset=offset)), 0.0)

    assert stream._round is not None
    notices = [each.notice for each in effects if isinstance(each, do.SendNotice)]
    assert ["sent a chunk twice" in getattr(each, "message", "") for each in notices] == [True]


@BOUNDED
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 9))))
def test_ranges_remember_exactly_the_elements(parts: list[tuple[int, int, int]]) -> None:
    finished, elements = FinishedRanges(), set[tuple[int, int]]()

    for block, start, count in parts:
        each = {(block, element) for element in range(start, start + count)}
        assert finished.overlaps(block, start, start + count) == bool(each & elements)
        finished.add(block, start, start + count)
        elements |= each

    starts = {(block, at) for block, at in elements if (block, at - 1) not in elements}
    assert finished.count == len(starts)


# ---------------------------------------------------------------------- states

SECRET = b"secret of the tests"


class Call:
    """A call's context: what a client sent, and what it was sent."""

    def __init__(self, *sent: bytes) -> None:
        self._sent = deque(sent)
        self.received: list[bytes] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._sent.popleft() if self._sent else grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.received.append(data)


def test_a_state_that_no_memory_can_hold_is_refused() -> None:
    first = reducer_pb2.PutStateRequest(transfer_id=3, size_bytes=2**63, sha256=bytes(32))
    states = StateServicer(
        Relay(1, patience_s=0.01),
        ReducerTelemetry(CollectorRegistry()),
        announced=Announced(SessionTokens(SECRET)),
        config=ReducerConfig(),
    )

    with pytest.raises(CallRefused, match="a state of 9223372036854775808 bytes"):
        asyncio.run(states.put(Call(first.SerializeToString())))  # type: ignore[arg-type]  # as below


@BOUNDED
@given(st.data())
def test_no_readable_piece_of_a_state_ends_the_relay_or_fills_its_memory(
    data: st.DataObject,
) -> None:
    state = bytes(range(100))
    token = tokens.session_token(SECRET, "run", 1, (7, 1))
    first = reducer_pb2.PutStateRequest(
        run_id="run",
        worker=1,
        session_token=token,
        transfer_id=3,
        size_bytes=len(state),
        sha256=hashlib.sha256(state).digest(),
    )
    first.head.term = 5
    asked = reducer_pb2.GetStateRequest(
        run_id="run", worker=1, session_token=token, transfer_id=3, offset=0
    )
    asked.head.term = 5
    pieces = [
        reducer_pb2.PutStateRequest(payload=state[at : at + 30]) for at in range(0, len(state), 30)
    ]
    right = data.draw(st.integers(0, 3)) == 0
    for message in () if right else (first, asked, *pieces):
        changed(data, message, most=1)

    async def story() -> None:
        # What is right must pass however busy the machine is; what is wrong may wait in vain.
        wait_s = 60.0 if right else 0.01
        config = ReducerConfig(opening_s=wait_s, state_s=wait_s, state_patience_s=wait_s)
        relay = Relay(config.limits.max_state_pieces, patience_s=config.state_patience_s)
        telemetry = ReducerTelemetry(CollectorRegistry())
        states = StateServicer(
            relay, telemetry, announced=Announced(SessionTokens(SECRET)), config=config
        )
        sent = [each.SerializeToString() for each in (first, *pieces)]
        calls: list[Any] = [
            states.put(Call(*sent)),  # type: ignore[arg-type]  # all of it that is used
            states.get(asked.SerializeToString(), Call()),  # type: ignore[arg-type]  # likewise
        ]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert not right or ends == [None, None]
        assert all(end is None or isinstance(end, CallRefused) for end in ends), ends
        assert held_bytes(relay) < 2**14

    asyncio.run(story())
