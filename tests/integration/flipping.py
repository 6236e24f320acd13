"""A network that corrupts data: a TCP relay in front of a service that flips one bit."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from integration.cut import Cable

__all__ = ["Direction", "FlippingRelay", "before_trailer", "in_run_of"]

Direction = str
"""`up`, to the service, or `down`."""

_TRAILER = re.compile(rb"\x75.{4}\x7d.{4}\Z", re.DOTALL)
"""The two checksums at the end of a message."""


def before_trailer(data: bytes) -> int | None:
    """Finds the least significant byte of the last float32 before a message's checksums."""
    found = _TRAILER.search(data)
    return None if found is None or found.start() < 64 else found.start() - 4


def in_run_of(number: bytes) -> Callable[[bytes], int | None]:
    """Finds the first byte of a number in the middle of many equal ones."""

    def find(data: bytes) -> int | None:
        found = data.find(16 * number)
        return None if found < 0 else found + 8 * len(number)

    return find


class FlippingRelay(Cable):
    """Relays connections to a port, and flips one bit at the first place that `find` returns."""

    read_bytes = 1 << 20

    def __init__(
        self,
        address: str,
        direction: Direction,
        find: Callable[[bytes], int | None],
        *,
        times: int = 1,
    ) -> None:
        """Listens on a free port.

        Args:
            address: the service's, on this host, as host:port.
            direction: which way bytes are changed.
            find: returns the index of the byte to change, if any.
            times: the number of messages to change.
        """
        self._direction, self._find = direction, find
        self._flips = times
        self.flipped = 0
        """The number of flipped bits."""
        self._lock = threading.Lock()
        super().__init__(int(address.rpartition(":")[2]))

    def carried(self, data: bytes, *, down: bool) -> bytes:
        """The bytes, possibly with one bit flipped."""
        if down != (self._direction == "down"):
            return data
        with self._lock:
            place = self._find(data) if self._flips else None
            if place is None:
                return data
            self._flips -= 1
            self.flipped += 1
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)
