"""A halt does not void the round: later StepReady messages still commit it."""

from __future__ import annotations

from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.state import CoreState
from conformance.breaking import serve_with

stop_line = CoreState.stop_line


def stop(core: CoreState, defect: LineDefect) -> None:
    round_ = core.round
    stop_line(core, defect)
    core.round = round_


if __name__ == "__main__":
    serve_with((CoreState, "stop_line", stop))
