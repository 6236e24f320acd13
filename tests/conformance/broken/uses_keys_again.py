"""Reuses the void round's key for the next attempt at the step."""

from __future__ import annotations

from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

drop_round = CoreState._drop_round


def again(core: CoreState) -> StepRound | None:
    round_ = drop_round(core)
    if round_ is not None:
        core.keys._round -= 1
    return round_


if __name__ == "__main__":
    serve_with((CoreState, "_drop_round", again))
