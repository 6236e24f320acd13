"""Verification: how much was computed twice, how often results differed, and who was convicted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from andon_coordinator.core.effects import NoteDifference, SaveVerdict
from andon_coordinator.core.verification import Proved, VerifiedTotals

__all__ = ["VerificationMetrics"]


class VerificationMetrics:
    """What the journal says of verified steps; a worker that is named is in the log and journal."""

    def __init__(self, registry: CollectorRegistry, totals: VerifiedTotals) -> None:
        """Registers the metrics; the counters begin at what the journal holds."""

        def counter(name: str, documentation: str, so_far: int) -> Counter:
            made = Counter(name, documentation, registry=registry)
            made.inc(so_far)
            return made

        self._steps = counter(
            "andon_verified_steps_total",
            "Committed steps that workers computed twice, since the run began.",
            totals.steps,
        )
        self._grains = counter(
            "andon_verified_grains_total",
            "Grains in them that two workers computed alike.",
            totals.grains,
        )
        self._differences = counter(
            "andon_verification_differences_total",
            "Attempts in which two workers computed different results of the same samples.",
            totals.differences,
        )
        self._convictions = counter(
            "andon_convictions_total",
            "Workers that computed wrong, as two others proved. Counted since the run began.",
            len(totals.convicted),
        )

    def committed(self, proved: Proved | None) -> None:
        """Counts a step that is durable."""
        if proved is not None and proved.drawn and proved.grains:
            self._steps.inc()
            self._grains.inc(proved.grains)

    def noted(self, effect: NoteDifference | SaveVerdict) -> None:
        """Counts a difference, or a verdict."""
        if isinstance(effect, NoteDifference):
            self._differences.inc()
        else:
            self._convictions.inc(effect.worker is not None)
