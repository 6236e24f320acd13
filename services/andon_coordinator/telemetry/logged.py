"""What scripts log, as one gauge by name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from andon_coordinator.core.effects import SaveScalars

__all__ = ["LoggedMetrics"]


class LoggedMetrics:
    """The last value of each name. The core bounds how many names a run has, and how they look."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metric; nothing was logged yet."""
        self._values = Gauge(
            "andon_logged_value",
            "Last value that scripts logged under a name: the mean over the workers that logged "
            "it at that step. Absent before the first since the service started.",
            ["name"],
            registry=registry,
        )
        self._last: dict[str, tuple[int, dict[int, float]]] = {}
        """By name: the newest step, and each worker's value at it."""

    def logged(self, effect: SaveScalars) -> None:
        """Shows what a worker logged."""
        for scalar in effect.scalars:
            step, values = self._last.get(scalar.name, (-1, {}))
            if scalar.step < step:
                continue  # Sent again after its worker joined again: there is a newer one.
            if scalar.step > step:
                step, values = scalar.step, {}
            values[effect.worker] = scalar.value
            self._last[scalar.name] = step, values
            self._values.labels(scalar.name).set(sum(values.values()) / len(values))
