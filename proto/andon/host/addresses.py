"""Hosts: whether what is sent to a host leaves this machine."""

from __future__ import annotations

import ipaddress

__all__ = ["host_of", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether a host is this one, seen from within."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """The host of a host:port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")
