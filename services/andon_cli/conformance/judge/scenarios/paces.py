"""Paces: how long what must not come is waited for; and what nobody knows."""

from __future__ import annotations

__all__ = ["QUIET_S", "UNKNOWN"]

QUIET_S = 0.3
"""The client has at least so long, and two heartbeats, to do what it must not."""

UNKNOWN = bytes.fromhex("ba3e03") + b"new"
"""Field 999 of any message: a case, or a field, of a later version."""
