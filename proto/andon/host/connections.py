"""How many connections a TCP lane has, as settings say it."""

from __future__ import annotations

from andon.protocol.limits import MAX_CONNECTIONS

__all__ = ["connections_of"]


def connections_of(text: str) -> int | None:
    """What `--connections` and ANDON_CONNECTIONS say: a number; None: `auto`.

    Raises:
        ValueError: it is neither.
    """
    if text.lower() == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_CONNECTIONS):
        raise ValueError(f"must be 1 to {MAX_CONNECTIONS}, or auto, not {text!r}")
    return int(text)
