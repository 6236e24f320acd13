"""Does not check session tokens: it believes the serial that one begins with."""

from __future__ import annotations

import struct

from andon.protocol.announcements import Serial
from andon_reducer.transport.admission import SessionTokens
from conformance.breaking import serve_with


def believe(_tokens: SessionTokens, _run_id: str, _worker: int, token: bytes) -> Serial:
    """Admits everybody. The serial has to be right, because transfers are bound to two joins."""
    serial: Serial = struct.unpack_from("<QQ", token)
    return serial


if __name__ == "__main__":
    serve_with((SessionTokens, "admit", believe))
