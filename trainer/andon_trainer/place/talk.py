"""What a worker tells its line beside the steps. Nothing here waits for an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from andon.protocol.scalars import Scalar
from andon_trainer.core.habit import Habit
from andon_trainer.core.reports import WrittenCheckpoint
from andon_trainer.exchange.control.connection import Connection

__all__ = ["LineTalk", "Silence", "Talk"]

log = logging.getLogger(__name__)

_ELSEWHERE = frozenset({"EVALUATING", "BUSY"})
"""Activities between two steps that the others would have to wait for."""


class Talk(Protocol):
    """What others see of a worker, and what its script logs."""

    def show(self, activity: str, detail: str = "") -> None:
        """Shows the others what this worker does: `activity` is a name of `andon.v1.Activity`."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Sends the line what the script logged."""

    def writes(self, step: int) -> None:
        """Notes the step whose checkpoint is being written beside training; 0: none is."""

    def wrote(self, checkpoint: WrittenCheckpoint) -> None:
        """Notes a checkpoint that this worker wrote; the line is told with the next message."""


class Silence:
    """Tells nobody: the worker is alone, or the leader of its host talks for it."""

    def show(self, activity: str, detail: str = "") -> None:
        """Does nothing."""

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Does nothing. `Line` writes the file of a worker that is alone."""

    def writes(self, step: int) -> None:
        """Does nothing."""

    def wrote(self, checkpoint: WrittenCheckpoint) -> None:
        """Does nothing."""


class LineTalk:
    """Tells the coordinator, with heartbeats and with requests for work."""

    def __init__(
        self,
        link: Connection,
        habit: Habit,
        checkpoint: WrittenCheckpoint | None = None,
        learning: Callable[[], str] = str,
    ) -> None:
        """Tells nothing yet.

        Args:
            link: to the coordinator.
            habit: the script's.
            checkpoint: the one that the worker started from; None: it started from none.
            learning: says how far a worker that learns is behind; empty: it does not learn.
        """
        self.checkpoint = checkpoint
        """The last checkpoint that this worker wrote or started from."""
        self.writing = 0
        """The step of a checkpoint that is being written beside training; 0: none is."""
        self._link = link
        self._habit = habit
        self._learning = learning
        self._lost_scalars = 0

    def show(self, activity: str, detail: str = "") -> None:
        """See `Talk`."""
        # A standing request is only made by a script that goes straight on: see `core.habit`.
        if activity in _ELSEWHERE:
            self._habit.does_something_else()
        # What it makes up of a step, the others have done long ago: nobody waits for that.
        learning = self._learning()
        self._link.control.show("SYNCING" if learning else activity, learning or detail)

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Sends them soon; a moment of silence loses none of them.

        Not while this worker learns: those on the roster have logged the same steps.
        """
        if self._learning():
            return
        before, self._lost_scalars = self._lost_scalars, self._link.outbox.put(scalars)
        if self._lost_scalars and not before:
            log.warning(
                "this script logs more than the line takes: the oldest scalars are given up. Call "
                "line.log less often"
            )

    def writes(self, step: int) -> None:
        """See `Talk`."""
        self.writing = step

    def wrote(self, checkpoint: WrittenCheckpoint) -> None:
        """See `Talk`."""
        self.checkpoint = checkpoint

    def went_back(self, step: int) -> None:
        """Forgets what was written after a step that the line went back to."""
        if self.checkpoint is not None and self.checkpoint.step > step:
            self.checkpoint = None
