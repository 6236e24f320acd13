"""Where a worker of a ring listens: on loopback, or on the interface that reaches the line."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

from andon_trainer.config import endpoint_of
from andon_trainer.exchange.ring import RingPlace

__all__ = ["place_of"]

_EVERYWHERE = ("0.0.0.0", "::")


def place_of(bind: str, coordinator: str, lease_s: float, tls: Path | None = None) -> RingPlace:
    """Where to listen, and under which host the others reach it.

    Args:
        bind: a host, host:port or [host]:port; empty: where the coordinator is reached from.
        coordinator: the coordinator, as host:port.
        lease_s: a neighbour that is silent for so long is lost.
        tls: the folder of certificates; None: the ring is not encrypted.

    Raises:
        ValueError: `bind` is neither, or `off`: then the worker should not have joined a ring.
    """
    if bind:
        host, port = endpoint_of("ring_bind (ANDON_RING_BIND)", bind)
    else:
        host, port = _reaching(coordinator), 0
    advertised = _reaching(coordinator) if host in _EVERYWHERE else host
    return RingPlace(bind=host, port=port, advertised=advertised, lease_s=lease_s, tls=tls)


def _reaching(coordinator: str) -> str:
    """The address from which this machine reaches the coordinator; loopback if it can't."""
    host, _, port = coordinator.rpartition(":")
    with suppress(OSError, ValueError):
        *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # Sends nothing: it only picks a route.
            return _plain(str(probe.getsockname()[0]))
    return "127.0.0.1"


def _plain(host: str) -> str:
    """Any address of loopback as the one that everybody listens on."""
    return "127.0.0.1" if ipaddress.ip_address(host) in _LOOPBACK else host


_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
