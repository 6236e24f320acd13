"""Vectors of the TCP lane: preambles, answers and frames, made from docs/tcp-lane.md alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from google.protobuf.message import Message

from andon.v1 import layout_pb2, record_pb2, reducer_pb2, ring_pb2
from vectors.bulk import average, gradient, ring
from vectors.crc import with_checksums
from vectors.names import KEY, TERM, TOKEN
from vectors.raw import field

__all__ = ["FRAMES", "PROOFS", "REFUSED", "frame", "lanes_file", "preamble", "proof"]

UP, DOWN, PASS = reducer_pb2.ReduceRequest, reducer_pb2.ReduceResponse, ring_pb2.PassRequest
NONCE = hashlib.sha256(b"a nonce of the vectors").digest()
MAX_HEAD = 65_536
_TO_LISTENER, _TO_CLIENT = 1, 2
_CHUNK = {UP: ("block_gradient", gradient), DOWN: ("averaged_block", average)}

Case = dict[str, Any]


def proof(
    side: str, key: bytes, nonce: bytes, direction: int, run_id: str, worker: int, *, index: int = 0
) -> bytes:
    """The 32 bytes by which a side ("client" or "server") shows that it knows the key."""
    run = run_id.encode()
    which = bytes([direction, index] if index else [direction])
    text = f"andon tcp{'-wide' if index else ''}.v1 {side}\0".encode() + which + nonce
    text += struct.pack("<I", len(run)) + run + struct.pack("<I", worker)
    return hmac.new(key, text, hashlib.sha256).digest()


def preamble(
    key: bytes, nonce: bytes, direction: int, run_id: str, worker: int, *, index: int = 0
) -> bytes:
    """The first 64 bytes of a connection."""
    mac = proof("client", key, nonce, direction, run_id, worker, index=index)
    return b"ANDONTCP" + nonce[:16] + bytes([direction, index]) + bytes(6) + mac


def segment(number: int, offset: int, part: bytes, payload_bytes: int, head: bytes = b"") -> bytes:
    """A segment of a frame."""
    said = struct.pack("<QIIII", number, offset, len(part), len(head), payload_bytes)
    return said + head + part


def frame(head: bytes, payload: bytes = b"", *, said: tuple[int, int] | None = None) -> bytes:
    """A frame; `said` replaces the true lengths of head and payload."""
    lengths = said or (len(head), len(payload))
    return struct.pack("<II", *lengths) + head + payload


def lanes_file() -> bytes:
    """The file conformance/tcp.json."""
    whole = {
        "description": "The TCP lane of andon.v1; docs/tcp-lane.md says what the bytes are. "
        "Bytes are hexadecimal.",
        "proofs": PROOFS,
        "frames": FRAMES,
        "refused": REFUSED,
        "segments": SEGMENTS,
        "refused_segments": REFUSED_SEGMENTS,
    }
    return (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode()


def _proof(
    name: str, key: bytes, direction: int, run_id: str, worker: int, *, index: int = 0
) -> Case:
    return {
        "name": name,
        "key": key.hex(),
        "nonce": NONCE.hex(),
        "direction": direction,
        "index": index,
        "run_id": run_id,
        "worker": worker,
        "preamble": preamble(key, NONCE, direction, run_id, worker, index=index).hex(),
        "answer": proof("server", key, NONCE, direction, run_id, worker, index=index).hex(),
    }


def _split(wrapper: type[Message], message: Any) -> tuple[bytes, bytes]:
    """A wrapper's head and payload: the same message without its payload."""
    whole: Any = wrapper.FromString(message.SerializeToString())
    content = getattr(whole, whole.WhichOneof("message"))
    payload = b""
    if "payload" in content.DESCRIPTOR.fields_by_name:
        payload = content.payload
        content.ClearField("payload")
    return whole.SerializeToString(deterministic=True), payload


def _frame(name: str, message: Any) -> Case:
    head, payload = _split(type(message), message)
    return {
        "name": name,
        "type": message.DESCRIPTOR.full_name,
        "frame": frame(head, payload).hex(),
        "head_bytes": len(head),
        "payload_bytes": len(payload),
        "message": message.SerializeToString(deterministic=True).hex(),
    }


def _refused(name: str, wrapper: type[Message], data: bytes, why: str) -> Case:
    return {"name": name, "type": wrapper.DESCRIPTOR.full_name, "frame": data.hex(), "why": why}


def _frames() -> list[Case]:
    whole_ring: list[Any] = [*ring()]
    entrance, header, chunk, *_ = whole_ring
    abstain = UP(abstain=reducer_pb2.Abstain(key=KEY, sequence=1, rank=1, world_size=2))
    stale = reducer_pb2.StaleRound(key=KEY, greatest=record_pb2.Key(term=TERM, round=12))
    nobody = average(element_count=0, contributors=0, total_weight=0.0, payload=b"")
    padded = gradient(padding=b"\0\0\0")
    half = gradient(encoding=layout_pb2.ENCODING_BFLOAT16, payload=bytes.fromhex("803f20c06040"))
    return [
        _frame("a gradient", UP(block_gradient=gradient())),
        _frame("a gradient with checksums", with_checksums(UP(block_gradient=gradient()))),
        _frame("a gradient in two bytes an element", UP(block_gradient=half)),
        _frame("padding, which a head does not need", UP(block_gradient=padded)),
        _frame("no payload: an abstention with its checksum", with_checksums(abstain)),
        _frame("an average with checksums", with_checksums(DOWN(averaged_block=average()))),
        _frame("an average of nobody: the payload is empty", DOWN(averaged_block=nobody)),
        _frame("a stale round", DOWN(stale_round=stale)),
        _frame("a ring's entrance", PASS(enter_round=entrance)),
        _frame("a ring's header with its checksum", with_checksums(PASS(ring_header=header))),
        _frame("a ring's chunk with checksums", with_checksums(PASS(ring_chunk=chunk))),
    ]


def _refusals() -> list[Case]:
    whole = UP(block_gradient=gradient())
    head, payload = _split(UP, whole)
    batch = UP(batch=reducer_pb2.ReduceRequestBatch(requests=[whole]))
    sliced = gradient(slice=reducer_pb2.SharedMemorySlice(offset=0, length=12, generation=1))
    changed = with_checksums(whole)
    changed.block_gradient.block = 2
    opening = UP(open_round=reducer_pb2.OpenRound(run_id="7f3a", session_token=TOKEN))
    bare, _ = _split(UP, UP(abstain=reducer_pb2.Abstain(key=KEY, rank=1, world_size=2)))
    opened = DOWN(round_opened=reducer_pb2.RoundOpened(max_payload_bytes=1024))
    bad: dict[str, tuple[type[Message], bytes, str]] = {
        "no head": (UP, frame(b""), "a head has at least one byte"),
        "a head above the limit": (
            UP,
            frame(b"", said=(MAX_HEAD + 1, 0)),
            "a head has at most 65536 bytes",
        ),
        "a payload above the limit": (
            UP,
            frame(head, said=(len(head), 2**32 - 1)),
            "a payload is at most max_payload_bytes",
        ),
        "a payload of one byte less": (UP, frame(head, payload[:-1]), "three elements are 12"),
        "a payload of one byte more": (UP, frame(head, payload + b"\0"), "three elements are 12"),
        "no payload": (UP, frame(head), "three elements are 12 bytes"),
        "a payload in the head": (
            UP,
            frame(whole.SerializeToString(), payload),
            "a head holds no payload",
        ),
        "a payload beside an abstention": (UP, frame(bare, payload), "an abstention has none"),
        "a slice of shared memory": (
            UP,
            frame(UP(block_gradient=sliced).SerializeToString()),
            "a lane and shared memory exclude each other",
        ),
        "a batch": (UP, frame(batch.SerializeToString()), "a lane carries no batch"),
        "a second OpenRound": (UP, frame(opening.SerializeToString()), "it belongs to gRPC"),
        "a second RoundOpened": (DOWN, frame(opened.SerializeToString()), "it belongs to gRPC"),
        "a case that is not known": (UP, frame(field(99, b"later")), "its case is not known"),
        "a head that is cut short": (UP, frame(head[:-1]), "a field is cut short"),
        "fields that were changed": (
            UP,
            frame(*_split(UP, changed)),
            "header_crc32c does not match",
        ),
        "a response on the way up": (
            UP,
            frame(DOWN(stale_round=reducer_pb2.StaleRound(key=KEY)).SerializeToString()),
            "case 4 of a request is another message",
        ),
    }
    return [_refused(name, *case) for name, case in bad.items()]


PROOFS = [
    _proof("the lane up of a star", TOKEN, _TO_LISTENER, "7f3a", 1),
    _proof("the lane down of a star", TOKEN, _TO_CLIENT, "7f3a", 1),
    _proof("a run's name beyond ASCII", TOKEN, _TO_LISTENER, "größe", 1023),
    _proof("the lane of a ring: its key is the nonce", NONCE, _TO_LISTENER, "", 0),
    _proof("a further connection of the lane up", TOKEN, _TO_LISTENER, "7f3a", 1, index=1),
    _proof("the last connection of the lane down", TOKEN, _TO_CLIENT, "7f3a", 1, index=15),
]
"""Preambles, and what the listener answers."""

FRAMES = _frames()
"""Frames that a receiver must take; `message` is the same message as gRPC carries it."""

REFUSED = _refusals()
"""Frames that a receiver must refuse."""


def _segments() -> list[Case]:
    first, _ = _split(UP, UP(block_gradient=gradient()))
    payload = gradient().payload
    bare, _ = _split(UP, UP(abstain=reducer_pb2.Abstain(key=KEY, rank=1, world_size=2)))
    cut = [
        (segment(0, 8, payload[8:], 12), 1),
        (segment(1, 0, b"", 0, bare), 1),
        (segment(0, 0, payload[:4], 12, first), 0),
        (segment(0, 4, payload[4:8], 12), 0),
    ]
    whole = [(segment(0, 0, payload, 12, first), 0), (segment(1, 0, b"", 0, bare), 0)]
    heads = [(segment(0, 0, b"", 12, first), 0), (segment(0, 0, payload, 12), 1)]
    return [
        _segmented("one segment a frame", whole, [first + payload, bare]),
        _segmented(
            "a payload in three, and a frame that overtakes it", cut, [first + payload, bare]
        ),
        _segmented("a head alone, and its payload behind", heads, [first + payload]),
    ]


def _segmented(name: str, segments: list[tuple[bytes, int]], frames: list[bytes]) -> Case:
    """Segments with the connections that they come on, and what they make: heads and payloads."""
    return {
        "name": name,
        "segments": [{"connection": at, "bytes": data.hex()} for data, at in segments],
        "frames": [each.hex() for each in frames],
    }


def _refused_segments() -> list[Case]:
    head, payload = _split(UP, UP(block_gradient=gradient()))
    first = segment(0, 0, payload[:8], 12, head)
    late = struct.pack("<QIIII", 0, 4, 4, len(head), 12) + head + payload[4:8]
    bad = {
        "a segment beyond its payload": (segment(0, 8, payload, 12, b""), "12 bytes end before"),
        "a head behind its payload's beginning": (late, "a head is at offset 0"),
        "a head that comes twice": (first + segment(0, 0, b"", 12, head), "it has come before"),
        "a byte that comes twice": (first + segment(0, 4, payload[4:], 12), "bytes 4 to 7 twice"),
        "another length of the same payload": (
            first + segment(0, 8, payload[8:], 16),
            "12, not 16",
        ),
        "neither head nor bytes": (first + segment(0, 8, b"", 12), "it says nothing"),
        "a head above the limit": (
            struct.pack("<QIIII", 0, 0, 0, MAX_HEAD + 1, 0),
            "a head has at most 65536 bytes",
        ),
        "a payload above the limit": (
            struct.pack("<QIIII", 0, 0, 1, 1, 2**32 - 1),
            "a payload is at most max_payload_bytes",
        ),
        "a segment of a frame that is whole": (
            segment(0, 0, payload, 12, head) + segment(0, 0, payload, 12),
            "it was handed on",
        ),
    }
    return [{"name": name, "bytes": data.hex(), "why": why} for name, (data, why) in bad.items()]


SEGMENTS = _segments()
"""Segments that a receiver must put together."""

REFUSED_SEGMENTS = _refused_segments()
"""What a receiver must refuse on one connection of a lane that may have several."""
