"""Peers: who is at the other end of a connection, and how many places each of them may have."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter

from andon.host.tls import is_loopback

__all__ = ["Places", "peer_of"]


def peer_of(address: str) -> str:
    """Whom an address counts for: itself, or its network, as one machine has 2^64 of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:  # as sockets for both versions call IPv4
            return str(parsed.ipv4_mapped)
        if not parsed.is_loopback:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


class Places:
    """Places for connections, of which nobody may have all. Any thread may ask."""

    def __init__(self, most: int, of_one_host: int) -> None:
        """At most `most`, and `of_one_host` of one peer; loopback may have all of them."""
        self._most = most
        self._of_one_host = of_one_host
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, address: str) -> bool:
        """Takes a place for a connection from `address`. False: there is none for it."""
        peer = peer_of(address)
        most = self._most if is_loopback(peer) else self._of_one_host
        with self._lock:
            if self._taken.total() >= self._most or self._taken[peer] >= most:
                return False
            self._taken[peer] += 1
            return True

    def leave(self, address: str) -> None:
        """Gives a place back that was taken for `address`."""
        peer = peer_of(address)
        with self._lock:
            self._taken[peer] -= 1
            if not self._taken[peer]:
                del self._taken[peer]
