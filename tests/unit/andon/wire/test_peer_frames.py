"""Frames between ranks: their heads, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.peer_calls import MAX_PIECE_BYTES, Call, CallKind, group_number, sends_number
from andon.protocol.peer_frames import Begin, LaneEnd, PeerFrame, Piece
from andon.v1 import session_pb2 as pb
from andon.wire.checksums import extended
from andon.wire.fields import FrameError
from andon.wire.peer_frames import crc32c_of, parse_head, peer_head
from unit.andon.golden import by_name, golden

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PIECES = st.builds(Piece, U64, U64, U32, U64, st.integers(1, MAX_PIECE_BYTES))
CALLS = st.builds(
    Call,
    kind=st.just(CallKind.REDUCE),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    count=U64,
    reduction=st.sampled_from(["sum", "max"]),
    root=st.integers(0, 4095),
    tag=U32,
    tensors=st.integers(1, 2**32 - 1),
)
BEGINS = st.builds(Begin, U64, U64, CALLS, U32, U64, st.booleans())
FRAMES = st.one_of(PIECES, BEGINS, st.just(LaneEnd()))


def payload_of(frame: PeerFrame) -> int:
    return frame.length if isinstance(frame, Piece) else 0


@settings(max_examples=40)
@given(frame=FRAMES, checksums=st.booleans())
def test_a_frame_comes_back_as_it_was(frame: PeerFrame, checksums: bool) -> None:
    head = memoryview(peer_head(frame, checksums=checksums))

    assert parse_head(head, payload_of(frame), checksums=checksums).frame == frame


@pytest.mark.parametrize("case", golden("peers", "frames"), ids=by_name)
def test_frames_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    head, payload = bytes.fromhex(case["head"]), bytes.fromhex(case["payload"])

    read = parse_head(memoryview(head), len(payload), checksums=True)

    assert peer_head(read.frame, [memoryview(payload)], checksums=True) == head
    assert extended(crc32c_of(read.frame), memoryview(payload)) == case["crc32c"]


@pytest.mark.parametrize("case", golden("peers", "groups"), ids=by_name)
def test_groups_have_the_numbers_of_the_vectors(case: dict[str, Any]) -> None:
    assert group_number(case["name"], case["ranks"]) == int(case["group"])
    assert sends_number(case["name"], case["ranks"]) == int(case["sends"])


def test_a_checksum_covers_the_fields_and_then_the_payload_wherever_it_lies() -> None:
    piece = Piece(1, 2, 0, 64, 6)
    views = [memoryview(b"abc"), memoryview(b"def")]

    read = parse_head(memoryview(peer_head(piece, views, checksums=True)), 6, checksums=True)

    assert read.crc32c == extended(crc32c_of(piece), memoryview(b"abcdef"))


@settings(max_examples=40)
@given(begin=BEGINS, other=BEGINS)
def test_a_begin_that_was_changed_on_its_way_is_refused(begin: Begin, other: Begin) -> None:
    changed = pb.PeerFrame.FromString(peer_head(other, checksums=True))
    changed.crc32c = pb.PeerFrame.FromString(peer_head(begin, checksums=True)).crc32c

    if begin == other:
        return
    with pytest.raises(FrameError, match="does not match its checksum"):
        parse_head(memoryview(changed.SerializeToString()), 0)


@settings(max_examples=60)
@given(data=st.binary(max_size=80), size=st.integers(0, 100))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes, size: int) -> None:
    try:
        read = parse_head(memoryview(data), size)
    except FrameError:
        return
    assert payload_of(read.frame) == size


@pytest.mark.parametrize(
    ("frame", "payload", "why"),
    [
        (pb.PeerFrame(), 0, "says nothing"),
        (pb.PeerFrame(piece=pb.Piece(length=8)), 7, "7 bytes follow, and 8"),
        (pb.PeerFrame(piece=pb.Piece(length=2**23)), 2**23, "a Piece of"),
        (pb.PeerFrame(lane_end=pb.LaneEnd()), 4, "4 bytes follow, and 0"),
        (pb.PeerFrame(begin=pb.Begin(call=pb.Call(kind=pb.CALL_KIND_SEND))), 0, "PeerFrame"),
        (pb.PeerFrame(begin=pb.Begin()), 0, "no CallKind"),
    ],
)
def test_what_no_rank_may_send_is_refused(frame: pb.PeerFrame, payload: int, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        parse_head(memoryview(frame.SerializeToString()), payload)


def test_a_frame_without_a_checksum_is_refused_where_all_ranks_make_them() -> None:
    head = memoryview(peer_head(LaneEnd()))

    with pytest.raises(FrameError, match="it has no checksum"):
        parse_head(head, 0, checksums=True)
