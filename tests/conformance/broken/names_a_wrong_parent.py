"""An assignment names its own key as its parent."""

from __future__ import annotations

from dataclasses import replace

from andon_coordinator.core.effects import Assign
from andon_coordinator.core.round import StepRound
from conformance.breaking import serve_with

assignments = StepRound.assignments


def orphans(round_: StepRound) -> list[Assign]:
    return [
        replace(each, assignment=replace(each.assignment, parent=round_.key))
        for each in assignments(round_)
    ]


if __name__ == "__main__":
    serve_with((StepRound, "assignments", orphans))
