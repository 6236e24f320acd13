"""Checksums: whatever changed on the way of a message is seen, unless it carries nothing."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from google_crc32c import value as crc32c_of_bytes

from andon.protocol.encoding import Encoding, encode
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockGradient,
    Operation,
    RingChunk,
    RingHeader,
    RingStage,
)
from andon.protocol.records import Key
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire.checksums import Checksummed, crc32c_of, is_intact
from andon.wire.frames import (
    FrameError,
    frame_pass,
    frame_request,
    frame_response,
    parse_pass,
    parse_request,
    parse_response,
)

KEY = Key(7 << 32 | 5, 3)
NUMBERS = encode(np.array([1.0, -2.5, 3.5], np.float32), Encoding.FLOAT32)
GRADIENT = BlockGradient(
    key=KEY, rank=1, world_size=2, block=3, offset=300, count=3, weight=32.0, payload=NUMBERS
)
AVERAGE = AveragedBlock(
    key=KEY,
    contributors=2,
    world_size=2,
    block=3,
    offset=300,
    count=3,
    total_weight=64.0,
    payload=NUMBERS,
)
ABSTAIN = Abstain(key=KEY, rank=1, world_size=2, sequence=4)
TERMS = RingHeader(
    key=KEY,
    rank=1,
    weight=32.0,
    operation=Operation.BROADCAST,
    data_bytes=9,
    data_head=b"digest",
    crc32c=True,
)
CHUNK = RingChunk(
    key=KEY, stage=RingStage.PARTIAL_SUM, block=3, offset=300, count=3, payload=NUMBERS
)
MESSAGES = {type(each).__name__: each for each in (GRADIENT, ABSTAIN, AVERAGE, TERMS, CHUNK)}


def framed(message: Checksummed, *, checksums: bool = True) -> bytes:
    match message:
        case BlockGradient() | Abstain():
            return frame_request(message, checksums=checksums)
        case AveragedBlock():
            return frame_response(message, checksums=checksums)
        case RingHeader() | RingChunk():
            return frame_pass(message, checksums=checksums)


def parsed(frame: bytes, like: Checksummed) -> object:
    match like:
        case BlockGradient() | Abstain():
            return parse_request(frame)
        case AveragedBlock():
            return parse_response(frame)
        case RingHeader() | RingChunk():
            return parse_pass(frame)


@pytest.mark.parametrize("name", MESSAGES)
def test_no_flipped_bit_passes_as_another_message(name: str) -> None:
    message = MESSAGES[name]
    frame, refused = framed(message), 0

    for place in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[place // 8] ^= 1 << place % 8
        try:
            found = parsed(bytes(changed), message)
        except FrameError:
            refused += 1
            continue
        if isinstance(found, BlockGradient | AveragedBlock | RingChunk):
            if not is_intact(found):
                refused += 1
                continue
            found = replace(found, crc32c=None)
        # A bit of the padding, or the header's checksum alone, is lost, and nothing with it.
        assert found == message

    assert refused > 0.6 * 8 * len(frame)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_reader_without_checksums_reads_the_same_message(name: str) -> None:
    message = MESSAGES[name]

    plain, frame = framed(message, checksums=False), framed(message)

    assert frame.startswith(plain), "they follow the message, and shift nothing in it"
    generated = _generated(message)
    generated.ParseFromString(frame)
    assert generated.SerializeToString(deterministic=True) == frame
    generated.ClearField("header_crc32c")
    generated.ClearField("crc32c")
    assert generated.SerializeToString(deterministic=True) == plain


def _generated(
    message: Checksummed,
) -> reducer_pb2.ReduceRequest | reducer_pb2.ReduceResponse | ring_pb2.PassRequest:
    match message:
        case BlockGradient() | Abstain():
            return reducer_pb2.ReduceRequest()
        case AveragedBlock():
            return reducer_pb2.ReduceResponse()
        case RingHeader() | RingChunk():
            return ring_pb2.PassRequest()


def test_checksums_cover_the_bytes_that_the_protocol_names() -> None:
    # The case of the oneof, then the fields by number, each at its full width; then the payload.
    header = struct.pack("<I", 2)
    header += struct.pack("<QQIIIIII", KEY.term, KEY.round, 0, 0, 1, 1, 2, 3)
    header += struct.pack("<QQdII", 300, 3, 32.0, Encoding.FLOAT32.value, 0)

    assert crc32c_of(GRADIENT) == crc32c_of_bytes(header + bytes(NUMBERS))
    assert crc32c_of_bytes(b"123456789") == 0xE3069283, "Castagnoli's polynomial"


def test_an_average_without_elements_has_the_checksum_of_its_header() -> None:
    zeros = replace(AVERAGE, count=0, payload=memoryview(b""), total_weight=0.0, contributors=0)

    found = parse_response(frame_response(zeros, checksums=True))

    assert isinstance(found, AveragedBlock)
    assert is_intact(found)


def test_a_number_that_its_field_can_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="BlockGradient"):
        crc32c_of(replace(GRADIENT, block=2**32))
