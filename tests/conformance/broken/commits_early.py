"""The first StepReady commits the step."""

from __future__ import annotations

from andon_coordinator.core import steps
from andon_coordinator.core.round import StepRound
from conformance.breaking import serve_with

if __name__ == "__main__":
    serve_with(
        (StepRound, "complete", property(lambda self: bool(self.ready))),
        (
            StepRound,
            "in_rank_order",
            property(
                lambda self: [
                    (each, self.ready[each]) for each in self.roster if each in self.ready
                ]
            ),
        ),
        (steps, "in_round", lambda *round_: None),
    )
