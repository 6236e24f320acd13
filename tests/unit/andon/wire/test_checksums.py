"""Checksums: whatever changed on the way of a message is seen, unless it carries nothing.

Which bytes they cover is in `conformance/messages`; `test_conformance_messages` tests it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
from andon.wire.checksums import crc32c_of, is_intact
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
UP = (frame_request, parse_request, reducer_pb2.ReduceRequest)
DOWN = (frame_response, parse_response, reducer_pb2.ReduceResponse)
PASS = (frame_pass, parse_pass, ring_pb2.PassRequest)
WAYS: dict[type, tuple[Any, Any, Any]] = {
    **{BlockGradient: UP, Abstain: UP, AveragedBlock: DOWN, RingHeader: PASS, RingChunk: PASS}
}


@pytest.mark.parametrize("name", MESSAGES)
def test_no_flipped_bit_passes_as_another_message(name: str) -> None:
    message = MESSAGES[name]
    write, parse, _ = WAYS[type(message)]
    frame, refused = write(message, checksums=True), 0

    for place in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[place // 8] ^= 1 << place % 8
        try:
            found = parse(bytes(changed))
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
    write, _, envelope = WAYS[type(message)]

    plain, frame = write(message, checksums=False), write(message, checksums=True)

    assert frame.startswith(plain), "they follow the message, and shift nothing in it"
    generated = envelope.FromString(frame)
    assert generated.SerializeToString(deterministic=True) == frame
    generated.ClearField("header_crc32c")
    generated.ClearField("crc32c")
    assert generated.SerializeToString(deterministic=True) == plain


def test_an_average_without_elements_has_the_checksum_of_its_header() -> None:
    zeros = replace(AVERAGE, count=0, payload=memoryview(b""), total_weight=0.0, contributors=0)

    found = parse_response(frame_response(zeros, checksums=True))

    assert isinstance(found, AveragedBlock)
    assert is_intact(found)


def test_a_number_that_its_field_can_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="BlockGradient"):
        crc32c_of(replace(GRADIENT, block=2**32))
