"""Lanes between the ranks of a session, made from docs/protocol-sessions.md alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from andon.v1 import session_pb2 as pb
from vectors.crc import crc32c
from vectors.names import TERM, TOKEN
from vectors.session_samples import peer_frames

__all__ = ["peers_file"]

Case = dict[str, Any]


def peers_file() -> bytes:
    """The file conformance/peers.json."""
    whole = {
        "description": "Tokens and nonces of lanes between ranks, numbers of groups, and frames "
        "with their checksums; docs/protocol-sessions.md, sections 27 and 28. Bytes are "
        "hexadecimal, terms and numbers of groups are decimal strings.",
        "tokens": [
            _token("from rank 0 to rank 1", TERM, 9, 0, 1, "7f3a"),
            _token("the other direction has another one", TERM, 9, 1, 0, "7f3a"),
            _token("the next session has others", TERM, 10, 0, 1, "7f3a"),
            _token("a run's name beyond ASCII", TERM, 9, 4095, 17, "größe"),
            _token("the greatest key", 2**64 - 1, 2**64 - 1, 0, 1, "7f3a"),
        ],
        "groups": [
            _group("default", [0, 1]),
            _group("the order counts", [1, 0]),
            _group("größe", [0, 4095]),
        ],
        "frames": [
            _frame(name, message, b"payload!" if name == "piece" else b"")
            for name, message in peer_frames().items()
        ],
    }
    return (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode()


def _token(name: str, term: int, round_: int, sender: int, receiver: int, run_id: str) -> Case:
    text = b"andon.peer.v1\0" + struct.pack("<QQII", term, round_, sender, receiver)
    token = hmac.new(TOKEN, text + run_id.encode(), hashlib.sha256).digest()
    return {
        "name": name,
        "secret": TOKEN.hex(),
        "run_id": run_id,
        "term": str(term),
        "round": str(round_),
        "sender": sender,
        "receiver": receiver,
        "token": token.hex(),
        "nonce": hashlib.sha256(b"andon.peer.nonce.v1\0" + token).hexdigest(),
    }


def _group(name: str, ranks: list[int]) -> Case:
    text = name.encode() + b"\0" + struct.pack(f"<{len(ranks)}I", *ranks)

    def number(purpose: bytes) -> str:
        return str(int.from_bytes(hashlib.sha256(purpose + text).digest()[:8], "little"))

    return {
        "name": name,
        "ranks": ranks,
        "group": number(b"andon.group.v1\0"),
        "sends": number(b"andon.sends.v1\0"),
    }


def _frame(name: str, message: pb.PeerFrame, payload: bytes) -> Case:
    """A frame whose checksum is of the bytes that rule 27.5 lists."""
    case = message.WhichOneof("frame")
    assert case is not None
    number = pb.PeerFrame.DESCRIPTOR.fields_by_name[case].number
    covered = struct.pack("<2QI", message.group, message.sequence, number)
    framed = pb.PeerFrame()
    framed.CopyFrom(message)
    if case == "piece":
        framed.piece.length = len(payload)
        covered += struct.pack("<I2Q", message.piece.stage, message.piece.offset, len(payload))
    elif case == "begin":
        begin, call = message.begin, message.begin.call
        covered += struct.pack("<2IQ", begin.rank, begin.receives, begin.gives_bytes)
        covered += struct.pack("<IQ3I", call.kind, call.count, call.root, call.tag, call.tensors)
        for word in (call.dtype.encode(), call.reduction.encode()):
            covered += struct.pack("<I", len(word)) + word
    framed.crc32c = crc32c(covered + payload)
    return {
        "name": name,
        "head": framed.SerializeToString(deterministic=True).hex(),
        "payload": payload.hex(),
        "crc32c": framed.crc32c,
    }
