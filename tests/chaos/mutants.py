"""Workers that do one thing of a window wrong, so that the judge can be tested.

Usage: mutants.py SPEC.json NAME, where NAME is one of MUTANTS.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from chaos.computing import Computing, LocalSteps
from chaos.model import Floats, LineState
from chaos.worker import Replica, Worker, main

__all__ = ["MUTANTS", "Mutant"]


@dataclass
class _Dropping(LocalSteps):
    """Leaves one local step out of each window, and says that it made it."""

    def due_step(self, epoch: int, part: list[int]) -> None:
        before = self.own.now
        super().due_step(epoch, part)
        if len(self.own.due) > len(part):
            self.own.now = before


@dataclass
class _Doubling(LocalSteps):
    """Makes each local step twice."""

    def due_step(self, epoch: int, part: list[int]) -> None:
        super().due_step(epoch, part)
        super().due_step(epoch, part)


@dataclass
class _Staying(LocalSteps):
    """Begins a window at its own weights of the last one, and not at the line's."""

    last: Floats | None = None

    def due_step(self, epoch: int, part: list[int]) -> None:
        if not self.own.due and self.last is not None:
            self.own.now = self.last
        super().due_step(epoch, part)
        self.last = self.own.now


@dataclass
class _Unordered(LocalSteps):
    """Says that it made its local steps in another order."""

    def compute(self, *arguments: Any) -> Any:
        return [*reversed(super().compute(*arguments))]


@dataclass
class _Keeping(LocalSteps):
    """Keeps the weights that it has sent the change of, and sends that change once more."""

    def after(self, state: LineState, *arguments: Any) -> LineState:
        own = self.own.now
        new = super().after(state, *arguments)
        if self.own.due:
            self.own.now = own
        return new


@dataclass
class _Jumping(LocalSteps):
    """Takes the line's weights at a commit, also of blocks that were not exchanged."""

    def after(self, state: LineState, *arguments: Any) -> LineState:
        new = super().after(state, *arguments)
        self.own.now = new.weights
        return new


@dataclass
class _Hasty(LocalSteps):
    """Sends what it computes ahead together with what is due."""

    early: Sequence[list[int]] = ()

    def compute(self, *arguments: Any) -> Any:
        parts = super().compute(*arguments)
        self.early = super().compute_ahead(arguments[0], lambda: None)
        self.own.due, self.own.ahead = [*self.own.due, *self.own.ahead], []
        return parts

    def compute_ahead(self, *_: Any) -> Any:
        return self.early


class _Forgetful(Replica):
    """Takes over the weights when it joins, and not the outer optimizer's momentum."""

    def install(self, data: bytes | bytearray) -> None:
        super().install(data)
        self.state = LineState(weights=self.state.weights)


class _Mutant(Worker):
    """A worker with another way to compute."""

    kind: type[LocalSteps] = LocalSteps

    def computing(self) -> Computing:
        right = super().computing()
        assert isinstance(right, LocalSteps)
        values = {each.name: getattr(right, each.name) for each in fields(LocalSteps)}
        return self.kind(**values)


class _Boasting(Worker):
    """Weighs what it sends by more samples than it has."""

    def weight(self, samples: int) -> float:
        return float(samples + 1)


def _computing(kind: type[LocalSteps]) -> type[Worker]:
    return type(kind.__name__, (_Mutant,), {"kind": kind})


class _Losing(Worker):
    """A worker with a forgetful replica."""

    replica = _Forgetful


@dataclass(frozen=True)
class Mutant:
    """A worker that is wrong, and what the judge says of it."""

    worker: type[Worker]
    says: str
    schedule: str = "local-nesterov"


MUTANTS = {
    "drops a local step": Mutant(_computing(_Dropping), "F-DP-001"),
    "makes a local step twice": Mutant(_computing(_Doubling), "F-DP-001"),
    "begins at other weights": Mutant(_computing(_Staying), "F-DP-001"),
    "logs another order": Mutant(_computing(_Unordered), "F-DP-001"),
    "loses the outer momentum at its join": Mutant(_Losing, "F-DP-001"),
    "gives its samples another weight": Mutant(_Boasting, "C-COMMIT-001"),
    "sends a change twice": Mutant(_computing(_Keeping), "F-DP-001", "overlapped"),
    "forgets what is left over": Mutant(_computing(_Jumping), "F-DP-001", "fragments"),
    "sends what is ahead": Mutant(_computing(_Hasty), "F-DP-001", "overlapped"),
}


if __name__ == "__main__":
    sys.exit(main(MUTANTS[sys.argv[2]].worker))
