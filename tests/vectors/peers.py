"""Tokens of lanes between the ranks of a session, made from docs/protocol-sessions.md alone."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from vectors.names import TERM, TOKEN

__all__ = ["peers_file"]

Case = dict[str, Any]


def peers_file() -> bytes:
    """The file conformance/peers.json."""
    whole = {
        "description": "Tokens and nonces of lanes between ranks; docs/protocol-sessions.md, "
        "section 27. Bytes are hexadecimal, a term is a decimal string.",
        "tokens": [
            _token("from rank 0 to rank 1", TERM, 9, 0, 1, "7f3a"),
            _token("the other direction has another one", TERM, 9, 1, 0, "7f3a"),
            _token("the next session has others", TERM, 10, 0, 1, "7f3a"),
            _token("a run's name beyond ASCII", TERM, 9, 4095, 17, "größe"),
            _token("the greatest key", 2**64 - 1, 2**64 - 1, 0, 1, "7f3a"),
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
