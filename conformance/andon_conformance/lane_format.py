"""The format of TCP lanes: preambles, proofs and frames.

Written from docs/tcp-lane.md, without Andon's own lane.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from asyncio import StreamReader
from dataclasses import dataclass

__all__ = [
    "CAPABILITY",
    "DIRECTION_AT",
    "DOWN",
    "NONCE_BYTES",
    "PREAMBLE_BYTES",
    "PROOF_BYTES",
    "SHOWN_BYTES",
    "UP",
    "Proof",
    "frame",
    "read_frame",
]

CAPABILITY = "tcp.v1"
UP, DOWN = 1, 2

NONCE_BYTES, PREAMBLE_BYTES, PROOF_BYTES = 32, 64, 32
SHOWN_BYTES = 16
"""How much of the nonce a preamble shows; the proof covers the whole."""
_MAGIC = b"ANDONTCP"
DIRECTION_AT = len(_MAGIC) + SHOWN_BYTES

_PREFIX = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the proofs of one lane are made of."""

    run_id: str
    worker: int
    session_token: bytes
    nonce: bytes

    def preamble(self, direction: int, *, proven: int | None = None) -> bytes:
        """What a client sends first; `proven` replaces the direction in the proof."""
        mac = self._mac(b"andon tcp.v1 client\0", direction if proven is None else proven)
        return _MAGIC + self.nonce[:SHOWN_BYTES] + bytes([direction]) + bytes(7) + mac

    def answer(self, direction: int) -> bytes:
        """What a listener answers."""
        return self._mac(b"andon tcp.v1 server\0", direction)

    def _mac(self, side: bytes, direction: int) -> bytes:
        run = self.run_id.encode()
        text = side + bytes([direction]) + self.nonce
        text += struct.pack("<I", len(run)) + run + struct.pack("<I", self.worker)
        return hmac.new(self.session_token, text, hashlib.sha256).digest()


def frame(head: bytes, payload: bytes) -> bytes:
    """A message as one frame: the payload behind the head, and not in it."""
    return _PREFIX.pack(len(head), len(payload)) + head + payload


async def read_frame(reader: StreamReader) -> tuple[bytes, bytes]:
    """Head and payload of the next frame. Raises as `readexactly`."""
    head_bytes, payload_bytes = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
    return await reader.readexactly(head_bytes), await reader.readexactly(payload_bytes)
