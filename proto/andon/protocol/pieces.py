"""The sizes of a state's pieces, at each end of its way.

Large pieces cost less. But on a slow link a large one takes seconds: nobody sees whether it moves,
and the connection's pings wait behind it until the other end is taken for lost.
"""

from __future__ import annotations

from andon.protocol.limits import STATE_PIECE_BYTES

__all__ = ["LEAST_PIECE_BYTES", "next_piece_bytes"]

LEAST_PIECE_BYTES = 2**16
"""The first piece has at most so many."""

_QUICK_S, _SLOW_S = 0.2, 0.5
_PART = 16
"""A piece is at most one part in so many of what was sent before it: at first buffers take what the
link does not."""


def next_piece_bytes(size: int, took_s: float, sent_bytes: int) -> int:
    """How large the next piece may be.

    Args:
        size: of the last one, at most.
        took_s: how long it took to send.
        sent_bytes: by all pieces so far.
    """
    if took_s > _SLOW_S:
        return max(size // 2, LEAST_PIECE_BYTES)
    if took_s > _QUICK_S:
        return size
    return max(min(2 * size, sent_bytes // _PART, STATE_PIECE_BYTES), size)
