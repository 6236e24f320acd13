"""What a later version of the protocol may send."""

from __future__ import annotations

__all__ = ["UNKNOWN"]

UNKNOWN = bytes.fromhex("ba3e03") + b"new"
"""Field 999 of any message: a case, or a field, of a later version."""
