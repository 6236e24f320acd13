"""Frames of the ring: equal to generated code, and hostile ones are refused (C-WIRE-002)."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding, encode
from andon.protocol.limits import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from andon.protocol.messages import (
    EnterRound,
    Operation,
    PassMessage,
    RingChunk,
    RingHeader,
    RingStage,
)
from andon.protocol.records import Key
from andon.protocol.ring import segment_elements
from andon.v1 import record_pb2, ring_pb2
from andon.wire.fields import FrameError, length_prefixed, varint
from andon.wire.frames import frame_pass, parse_pass
from unit.andon.generated import number

KEY = Key(7 << 32 | 5, 3)
BOUNDED = settings(max_examples=60, deadline=None)

keys = st.builds(Key, st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
numbers = st.integers(0, 2**32 - 1)
enters = st.builds(
    EnterRound, key=keys, rank=numbers, world_size=numbers, token=st.binary(max_size=40)
)
headers = st.builds(
    RingHeader,
    key=keys,
    rank=numbers,
    weight=st.floats(allow_nan=False),
    sequence=numbers,
    operation=st.sampled_from([None, Operation.WEIGHTED_MEAN, Operation.BROADCAST]),
    first_block=numbers,
    stop_block=numbers,
    data_bytes=st.integers(0, 2**64 - 1),
    data_head=st.binary(max_size=40),
)


@st.composite
def chunks(draw: st.DrawFn) -> RingChunk:
    values = draw(st.lists(st.floats(width=16), min_size=1, max_size=20))
    encoding = draw(st.sampled_from([Encoding.FLOAT32, Encoding.BFLOAT16, Encoding.FLOAT16]))
    return RingChunk(
        key=draw(keys),
        stage=draw(st.sampled_from(RingStage)),
        block=draw(numbers),
        offset=draw(st.integers(0, 2**64 - 1)),
        count=len(values),
        payload=encode(np.array(values, np.float32), encoding),
        encoding=encoding,
        sequence=draw(numbers),
    )


def generated(message: PassMessage, padding: bytes) -> bytes:
    """The message as generated code writes it."""
    key = record_pb2.Key(term=message.key.term, round=message.key.round)
    match message:
        case EnterRound():
            enter = ring_pb2.EnterRound(
                key=key, rank=message.rank, world_size=message.world_size, token=message.token
            )
            return ring_pb2.PassRequest(enter_round=enter).SerializeToString()
        case RingHeader():
            header = ring_pb2.RingHeader(
                key=key,
                sequence=message.sequence,
                rank=message.rank,
                weight=message.weight,
                operation=number(message.operation) if message.operation else None,
                first_block=message.first_block,
                stop_block=message.stop_block,
                data_bytes=message.data_bytes,
                data_head=message.data_head,
            )
            return ring_pb2.PassRequest(ring_header=header).SerializeToString()
        case RingChunk():
            chunk = ring_pb2.RingChunk(
                key=key,
                sequence=message.sequence,
                stage=number(message.stage),
                block=message.block,
                element_offset=message.offset,
                element_count=message.count,
                encoding=number(message.encoding),
                padding=padding,
                payload=bytes(message.payload),
            )
            return ring_pb2.PassRequest(ring_chunk=chunk).SerializeToString()


@BOUNDED
@given(st.one_of(enters, headers, chunks()))
def test_c_wire_002_a_ring_frame_equals_what_generated_code_writes(message: PassMessage) -> None:
    frame = frame_pass(message)

    padding = ring_pb2.PassRequest.FromString(frame).ring_chunk.padding
    written = generated(message, padding)
    if padding or not isinstance(message, RingChunk):
        assert frame == written
    assert parse_pass(frame) == message
    assert parse_pass(written) == message


@BOUNDED
@given(chunks())
def test_payloads_are_aligned(message: RingChunk) -> None:
    frame = frame_pass(message)

    assert (len(frame) - message.payload.nbytes) % 16 == 0


@BOUNDED
@given(st.one_of(enters, headers, chunks()), st.data())
def test_c_wire_002_a_frame_cut_short_is_an_error(
    message: PassMessage, data: st.DataObject
) -> None:
    frame = frame_pass(message)
    cut = data.draw(st.integers(0, len(frame) - 1))

    with pytest.raises(FrameError):
        parse_pass(frame[:cut])


@BOUNDED
@given(st.binary(max_size=200))
def test_c_wire_002_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    with suppress(FrameError):
        parse_pass(data)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "no message"),
        (varint(9 << 3 | 2) + length_prefixed(b""), "no message"),
        (varint(1 << 3) + b"\x01", "wire type 0"),
        (varint(2 << 3 | 2) + length_prefixed(b""), "lacks key"),
    ],
)
def test_c_wire_002_bytes_that_are_no_message_are_refused(data: bytes, error: str) -> None:
    with pytest.raises(FrameError, match=error):
        parse_pass(data)


def test_a_count_that_does_not_match_the_payload_is_refused() -> None:
    chunk = RingChunk(
        key=KEY,
        stage=RingStage.AVERAGE,
        block=0,
        offset=0,
        count=2,
        payload=memoryview(bytes(4)),
    )

    with pytest.raises(ValueError, match="4 bytes of payload for 2 elements"):
        frame_pass(chunk)


def test_a_partial_sum_fits_a_message_whatever_the_chunks_are() -> None:
    # Chunks of bfloat16 may have twice the elements that fit a message of float32.
    most = segment_elements(MAX_PAYLOAD_BYTES // 2)

    chunk = RingChunk(
        key=KEY,
        stage=RingStage.PARTIAL_SUM,
        block=2**32 - 1,
        offset=2**48,
        count=most,
        payload=memoryview(bytes(4 * most)),
    )
    assert len(frame_pass(chunk)) <= MAX_MESSAGE_BYTES
