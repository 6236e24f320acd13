"""Hosts: what an interface's address means from here."""

from __future__ import annotations

__all__ = ["reachable"]


def reachable(bind: str) -> str:
    """The host by which this machine reaches what listens on `bind`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(bind, bind)
