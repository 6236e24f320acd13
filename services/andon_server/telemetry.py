"""Metrics of a service's port, whatever it serves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from andon_server.handshakes import HandshakeFailure

__all__ = ["Handshakes"]


class Handshakes:
    """Counts the TLS handshakes that clients began, and those that failed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers both; every failure is there from now on, at 0."""
        self._begun = Counter(
            "andon_tls_handshakes", "TLS handshakes that clients began", registry=registry
        )
        failed = Counter(
            "andon_tls_handshake_failures",
            "TLS handshakes that failed, as gRPC wrote",
            ["reason"],
            registry=registry,
        )
        self._failed = {failure: failed.labels(failure) for failure in HandshakeFailure}

    def begun(self) -> None:
        """A client began one."""
        self._begun.inc()

    def failed(self, failure: HandshakeFailure, times: int) -> None:
        """So many came to nothing."""
        self._failed[failure].inc(times)
