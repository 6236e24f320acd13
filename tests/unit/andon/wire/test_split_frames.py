"""Split frames: the same messages with the payload behind the head, as a TCP lane carries them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Request,
    Response,
    RingChunk,
    RingStage,
    Slice,
)
from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire import checksums
from andon.wire.fields import FrameError
from andon.wire.frames import (
    batch_requests,
    frame_request,
    parse_pass_head,
    parse_request_head,
    parse_response_head,
    split_pass,
    split_request,
    split_response,
    with_payload,
)
from unit.andon.strategies import BOUNDED, requests, responses

KEY = Key(7 << 32 | 5, 3)
GRADIENT = BlockGradient(
    key=KEY,
    rank=1,
    world_size=2,
    block=4,
    offset=8,
    count=2,
    weight=32.0,
    payload=memoryview(bytes(range(8))),
)
NO_BYTES = memoryview(b"")


def is_slice(message: Request | Response) -> bool:
    return isinstance(message, BlockGradient | AveragedBlock) and message.slice is not None


@BOUNDED
@given(requests.filter(lambda message: not is_slice(message)))
def test_c_wire_002_a_split_request_round_trips(message: Request) -> None:
    head, payload = split_request(message)

    read = parse_request_head(memoryview(head), 0 if payload is None else payload.nbytes)

    assert with_payload(read, payload or NO_BYTES) == message


@BOUNDED
@given(responses.filter(lambda message: not is_slice(message)))
def test_c_wire_002_a_split_response_round_trips(message: Response) -> None:
    head, payload = split_response(message)

    read = parse_response_head(memoryview(head), 0 if payload is None else payload.nbytes)

    assert with_payload(read, payload or NO_BYTES) == message


def test_a_chunk_of_a_ring_round_trips() -> None:
    payload = memoryview(bytes(8))
    chunk = RingChunk(
        key=KEY, stage=RingStage.PARTIAL_SUM, block=1, offset=2, count=2, payload=payload
    )

    head, behind = split_pass(chunk, checksums=True)

    read = with_payload(parse_pass_head(memoryview(head), 8), payload)
    assert behind is payload
    assert read == replace(chunk, crc32c=checksums.crc32c_of(chunk))


def test_the_head_is_the_message_without_its_payload_for_generated_code() -> None:
    head, payload = split_request(GRADIENT, checksums=True)

    read = reducer_pb2.ReduceRequest.FromString(head)
    whole = reducer_pb2.ReduceRequest.FromString(frame_request(GRADIENT, checksums=True))
    assert payload is GRADIENT.payload  # not copied
    assert (read.header_crc32c, read.crc32c) == (whole.header_crc32c, whole.crc32c)
    whole.block_gradient.ClearField("payload")
    whole.block_gradient.ClearField("padding")
    assert read == whole


def test_a_head_whose_checksum_does_not_match_is_refused_before_its_payload_is_read() -> None:
    head, _ = split_request(GRADIENT, checksums=True)
    other, _ = split_request(replace(GRADIENT, rank=0))
    changed = other + head[len(other) :]

    with pytest.raises(FrameError, match="does not match its header_crc32c"):
        parse_request_head(memoryview(changed), 8)


@pytest.mark.parametrize("announced", [0, 4, 12])
def test_a_head_that_disagrees_with_the_announced_payload_is_refused(announced: int) -> None:
    head, _ = split_request(GRADIENT)

    with pytest.raises(FrameError, match=f"{announced} bytes of payload for 2 elements"):
        parse_request_head(memoryview(head), announced)


@pytest.mark.parametrize(
    ("head", "payload_bytes", "why"),
    [
        (frame_request(GRADIENT), 8, "its numbers in its head"),
        (frame_request(replace(GRADIENT, payload=NO_BYTES, slice=Slice(0, 8, 1))), 8, "in shared"),
        (split_request(Abstain(key=KEY, rank=0, world_size=2))[0], 4, "Abstain has no payload"),
        (batch_requests([frame_request(OpenRound("a", 0, b""))] * 2), 0, "batch"),
        (b"\xff", 0, "cut short"),
    ],
)
def test_a_head_that_has_no_place_on_a_lane_is_refused(
    head: bytes, payload_bytes: int, why: str
) -> None:
    with pytest.raises(FrameError, match=why):
        parse_request_head(memoryview(head), payload_bytes)


def test_a_slice_of_shared_memory_is_not_sent_over_a_lane() -> None:
    with pytest.raises(ValueError, match="a slice of shared memory"):
        split_request(replace(GRADIENT, payload=NO_BYTES, slice=Slice(0, 8, 1)))
