"""No record says that gradients overflowed."""

from __future__ import annotations

from andon_coordinator.core.round import StepRound
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with((StepRound, "overflow", property(lambda _round: False)))
