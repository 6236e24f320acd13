"""Workers that do one thing of a window wrong, so that the judge can be tested.

Usage: mutants.py SPEC.json NAME, where NAME is one of MUTANTS.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from andon_trainer.core.events import Assigned
from chaos.computing import Computing, LocalSteps
from chaos.model import Floats, LineState
from chaos.worker import Replica, Worker, main

__all__ = ["MUTANTS"]


@dataclass
class _Dropping(LocalSteps):
    """Leaves one local step out of each window, and says that it made it."""

    def _part(self, assigned: Assigned, part: list[int]) -> None:
        before = self.now
        super()._part(assigned, part)
        if len(self.steps) == 2:
            self.now = before


@dataclass
class _Doubling(LocalSteps):
    """Makes one local step of each window twice."""

    def _part(self, assigned: Assigned, part: list[int]) -> None:
        super()._part(assigned, part)
        if len(self.steps) == 2:
            super()._part(assigned, part)
            self.steps.pop()


@dataclass
class _Staying(LocalSteps):
    """Begins a window at its own weights of the last one, and not at the line's."""

    def _begin(self, state: LineState) -> None:
        own: Floats | None = self.now
        super()._begin(state)
        self.now = state.weights if own is None else own


@dataclass
class _Unordered(LocalSteps):
    """Says that it made its local steps in another order."""

    def _computed(self, *arguments: Any) -> Any:
        self.steps.reverse()
        return super()._computed(*arguments)


class _Forgetful(Replica):
    """Takes over the weights when it joins, and not the outer optimizer's momentum."""

    def install(self, data: bytes) -> None:
        super().install(data)
        self.state = LineState(weights=self.state.weights)


class _Mutant(Worker):
    """A worker with another way to compute."""

    kind: type[LocalSteps] = LocalSteps

    def computing(self) -> Computing:
        right = super().computing()
        assert isinstance(right, LocalSteps)
        return self.kind(right.task, outer=right.outer)


class _Boasting(Worker):
    """Weighs what it sends by more samples than it has."""

    def weight(self, samples: int) -> float:
        return float(samples + 1)


def _computing(kind: type[LocalSteps]) -> type[Worker]:
    return type(kind.__name__, (_Mutant,), {"kind": kind})


class _Losing(Worker):
    """A worker with a forgetful replica."""

    replica = _Forgetful


MUTANTS: dict[str, tuple[type[Worker], str]] = {
    "drops a local step": (_computing(_Dropping), "F-DP-001"),
    "makes a local step twice": (_computing(_Doubling), "F-DP-001"),
    "begins at other weights": (_computing(_Staying), "F-DP-001"),
    "logs another order": (_computing(_Unordered), "F-DP-001"),
    "loses the outer momentum at its join": (_Losing, "F-DP-001"),
    "gives its samples another weight": (_Boasting, "C-COMMIT-001"),
}
"""For each mutant its worker, and what the judge says."""


if __name__ == "__main__":
    sys.exit(main(MUTANTS[sys.argv[2]][0]))
