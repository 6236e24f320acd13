"""Metrics of a service's port, whatever it serves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

__all__ = ["handshakes_in"]


def handshakes_in(registry: CollectorRegistry) -> Counter:
    """Counts the TLS handshakes that clients began.

    gRPC tells nobody what becomes of one: those that fail can't be told apart.
    """
    return Counter("andon_tls_handshakes", "TLS handshakes that clients began", registry=registry)
