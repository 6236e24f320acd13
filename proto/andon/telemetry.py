"""Telemetry: the one metric that both services have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from andon.reasons import Reason

__all__ = ["Refusals"]


class Refusals:
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
        """What counts a call of `service`, or one that the server ended before either saw it.

        Every reason is there from now on, at 0.
        """
        counts = {reason: self._counter.labels(service, reason.lower()) for reason in Reason}

        def count(reason: Reason) -> None:
            counts[reason].inc()

        return count
