"""The processes of a worker: what a step does differently if its host has several.

To the line a host is one worker, whose share its processes divide. A schedule asks a `Processes`
wherever that makes a difference; most workers are `OneProcess`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from andon_trainer.data.feed import Share
from andon_trainer.schedules.grain_losses import GrainLosses
from andon_trainer.schedules.step_state import StepState

__all__ = ["GradientProcesses", "GrainProcesses", "OneProcess", "Processes", "Weighed"]


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the processes of a worker agreed on, before a step's last backward."""

    weight: float
    """That of the worker's gradient."""
    scale: float | None
    """Makes this process's accumulated sum its part of the mean; None: it is a mean already."""
    stop_wanted: str
    """Why a script wants the run to end; empty if none does."""


class Processes(Protocol):
    """The processes that are one worker, of which this is one."""

    several: bool
    """Whether there are others."""
    leads: bool
    """Whether this one reports what the worker has computed."""

    def begin(self, state: StepState) -> None:
        """A step begins, with what is kept of the attempt before."""

    def part_of(self, share: Share, epoch: int) -> Share:
        """This process's part of the worker's share; `epoch` is that of the present step."""


class GradientProcesses(Processes, Protocol):
    """The same, if they make one gradient together."""

    waits_in_model: bool
    """Whether other processes wait for each of this one's backwards."""

    def refuses_later(self, state: StepState, loss: float) -> bool:
        """Whether a loss that is not finite goes backward, and the step is refused at its end."""

    def weigh(self, state: StepState, *, whole: bool, stop_wanted: str) -> Weighed | None:
        """Agrees on the step; None if the line halted meanwhile.

        Args:
            state: the step, which becomes the worker's as far as this process reports it.
            whole: whether this process's gradient is a mean already.
            stop_wanted: why this process's script wants the run to end.
        """


class GrainProcesses(Processes, Protocol):
    """The same on a line of grains, of which each computes some whole."""

    def share_losses(self, state: StepState, losses: GrainLosses, stop_wanted: str) -> str | None:
        """Tells the others of this process's grains, before the last backward.

        Args:
            state: the step, which becomes the worker's as far as this process reports it.
            losses: of this process's grains; then of all of the worker's.
            stop_wanted: why this process's script wants the run to end.

        Returns:
            Why a script wants the run to end; None: the line halted meanwhile.
        """


class OneProcess:
    """A worker that is one process."""

    several = False
    leads = True
    waits_in_model = False

    def begin(self, state: StepState) -> None:
        """Does nothing."""

    def part_of(self, share: Share, epoch: int) -> Share:
        """The share."""
        return share

    def refuses_later(self, state: StepState, loss: float) -> bool:
        """False: the line is halted at once."""
        return False

    def weigh(self, state: StepState, *, whole: bool, stop_wanted: str) -> Weighed | None:
        """The step's own weight."""
        scale = None if whole or not state.weight else state.unit / state.weight
        return Weighed(state.weight, scale, stop_wanted)

    def share_losses(self, state: StepState, losses: GrainLosses, stop_wanted: str) -> str | None:
        """There is nobody to tell."""
        return stop_wanted
