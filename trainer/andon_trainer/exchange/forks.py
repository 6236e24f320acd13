"""Forks: a forked child does not keep the line's connections open.

Theory of operation. The prepared loader's processes start before any connection exists. Those of
other loaders fork while this worker is on the line, and so inherit its sockets: Python's own, and
those of older gRPC. A connection ends for the other side when the last process that holds it is
gone: the line would not notice this worker's death as long as such a child lives, and its ports
would be taken. So each child closes what it inherited of the line's.

Nothing of gRPC may run in a child either, for its threads, and the locks that they held, are not
there. A child uses none of it, but collecting garbage could: what it inherits is never collected.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["close_in_children"]

_DESCRIPTORS = Path("/dev/fd")

_ports: set[int] = set()
"""The line's ports, there and here."""


def close_in_children(address: str) -> None:
    """From now on a forked child closes connections with this host:port, there or here."""
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        return  # nothing is connected without a port
    if not _ports:
        os.register_at_fork(after_in_child=_forget_the_line)
    _ports.add(int(port))


def _forget_the_line() -> None:
    gc.freeze()
    for entry in os.listdir(_DESCRIPTORS):
        descriptor = int(entry)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _ports & _ports_of(descriptor):
                os.close(descriptor)
        except OSError:
            continue  # the listing's own, closed already


def _ports_of(descriptor: int) -> set[int]:
    """The ports at both ends of a socket; none if it is not of TCP or UDP."""
    ports: set[int] = set()
    with socket.socket(fileno=os.dup(descriptor)) as probe:
        if probe.family not in (socket.AF_INET, socket.AF_INET6):
            return ports
        ports.add(probe.getsockname()[1])
        with suppress(OSError):  # it listens, or is not connected
            ports.add(probe.getpeername()[1])
    return ports
