"""Texts: words for people that a peer sends, cut before they are kept, logged or passed on."""

from __future__ import annotations

from andon.protocol.limits import MAX_TEXT_BYTES

__all__ = ["clipped"]

_CUT = "…"


def clipped(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """`text` in at most so many bytes of UTF-8; an ellipsis stands for what is cut off.

    What UTF-8 can't hold (half a surrogate pair) becomes a question mark, so that any message of
    an exception can be sent.
    """
    data = text.encode(errors="replace")
    if len(data) > max_bytes:
        room = max_bytes - len(_CUT.encode())
        return data[:room].decode(errors="ignore") + _CUT
    return data.decode()
