"""Telemetry: the line's metrics for Prometheus, fed with the core's events and effects."""

from andon_coordinator.telemetry.attempts import AttemptCause
from andon_coordinator.telemetry.line import LineMetrics
from andon_coordinator.telemetry.run import ServedRun, Totals
from andon_coordinator.telemetry.sessions import SessionMetrics

__all__ = ["AttemptCause", "LineMetrics", "ServedRun", "SessionMetrics", "Totals"]
