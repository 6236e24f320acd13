"""Framing: lengths are checked before anything is read."""

from __future__ import annotations

import struct

import pytest

from andon.tcp.framing import MAX_HEAD_BYTES, PREFIX_BYTES, prefixed, read_prefix
from andon.wire.fields import FrameError


def test_a_frame_begins_with_both_lengths_and_the_head() -> None:
    data = prefixed(b"head", memoryview(bytes(300)))

    assert data == b"\4\0\0\0\x2c\1\0\0head"
    assert read_prefix(data[:PREFIX_BYTES], 300) == (4, 300)


def test_a_frame_without_a_payload_announces_none() -> None:
    assert read_prefix(prefixed(b"h", None)[:PREFIX_BYTES], 1) == (1, 0)


@pytest.mark.parametrize("head", [b"", bytes(MAX_HEAD_BYTES + 1)])
def test_a_head_that_the_other_end_would_refuse_is_not_sent(head: bytes) -> None:
    with pytest.raises(ValueError, match="a head has 1 to 65536 bytes"):
        prefixed(head, None)


@pytest.mark.parametrize(
    ("head_bytes", "payload_bytes", "why"),
    [
        (0, 0, "a head of 0 bytes"),
        (MAX_HEAD_BYTES + 1, 0, "a head of 65537 bytes"),
        (2**32 - 1, 0, "a head of 4294967295 bytes"),
        (1, 101, "above the limit of 100"),
        (1, 2**32 - 1, "above the limit of 100"),
    ],
)
def test_lengths_beyond_their_limits_are_refused(
    head_bytes: int, payload_bytes: int, why: str
) -> None:
    with pytest.raises(FrameError, match=why):
        read_prefix(struct.pack("<II", head_bytes, payload_bytes), 100)
