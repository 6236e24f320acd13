"""Hosts: what a host's name or an interface's address means from here."""

from __future__ import annotations

from andon.hosts import is_loopback

__all__ = ["is_loopback", "reachable"]


def reachable(bind: str) -> str:
    """The host by which this machine reaches what listens on `bind`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(bind, bind)
