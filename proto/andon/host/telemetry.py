"""Telemetry: the metrics that both services have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from andon.protocol.reasons import Reason

__all__ = ["ExchangeDurations", "HandshakeCounter", "RefusalCounter"]

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)


class ExchangeDurations:
    """Times exchanges; one for each registry.

    A reducer times those that it averages. On a ring only the workers see them, and report their
    times to the coordinator.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric."""
        self._seconds = Histogram(
            "andon_allreduce_seconds",
            "From an exchange's first contribution to its last average.",
            buckets=_SECONDS,
            registry=registry,
        )

    def took(self, seconds: float) -> None:
        """Counts an exchange that took so long."""
        self._seconds.observe(seconds)


class RefusalCounter:
    """Counts calls that were ended with a reason; one for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric, without any service yet."""
        self._counter = Counter(
            "andon_refusals_total",
            "Calls that were ended with an error.",
            ["service", "reason"],
            registry=registry,
        )

    def of(self, service: Literal["coordinator", "reducer", "server"]) -> Callable[[Reason], None]:
        """A function that counts a refused call of `service`.

        `server` is for calls that were refused before a service saw them. From now on every reason
        has a count, at first 0, so that a rate can be computed from its first refusal on.
        """
        counts = {reason: self._counter.labels(service, reason.lower()) for reason in Reason}

        def count(reason: Reason) -> None:
            counts[reason].inc()

        return count


class HandshakeCounter:
    """Counts the TLS handshakes that clients begin. gRPC does not report those that fail."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the counter, at 0."""
        self._begun = Counter(
            "andon_tls_handshakes", "TLS handshakes that clients began", registry=registry
        )

    def begun(self) -> None:
        """A client began one."""
        self._begun.inc()
