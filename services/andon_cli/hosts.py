"""Hosts: what a host's name or an interface's address means from here."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "reachable"]


def is_loopback(host: str) -> bool:
    """Whether a host is this one, seen from within."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def reachable(bind: str) -> str:
    """The host by which this machine reaches what listens on `bind`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}.get(bind, bind)
