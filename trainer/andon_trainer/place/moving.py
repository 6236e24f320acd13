"""Moving: the line's state on its way to or from a worker, or from a checkpoint that it loads."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from andon.host.logs import LogEvent
from andon_trainer.core.events import TransferAsked
from andon_trainer.errors import CheckpointRefused
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.giving import StateGiver
from andon_trainer.exchange.control.transfer import StateMover
from andon_trainer.place.candidate import Candidate
from andon_trainer.place.talk import LineTalk
from andon_trainer.timeline import Timeline

__all__ = ["StateMoves"]

log = logging.getLogger(__name__)


class StateMoves:
    """Moves one worker's state. Used by one thread."""

    def __init__(
        self,
        link: Connection,
        candidate: Candidate,
        shared_dir: Path | None,
        talk: LineTalk,
        timeline: Timeline | None,
    ) -> None:
        """Moves nothing yet.

        Args:
            link: to the coordinator.
            candidate: has the state, and loads checkpoints.
            shared_dir: where it lies for a worker on this host; None: nowhere.
            talk: tells the others.
            timeline: where moves are recorded; None: nowhere.
        """
        self._candidate = candidate
        self._talk = talk
        self._timeline = timeline
        self._mover = StateMover(link, candidate.replica, shared_dir)
        self._giver = StateGiver(link, candidate.replica, shared_dir)

    @property
    def arrived_bytes(self) -> int:
        """How much of the last state has come."""
        return self._mover.arrived_bytes

    def give(self, asked: TransferAsked) -> None:
        """Sends state beside training; returns at once."""
        self._giver.give(asked)

    def get_ready(self) -> None:
        """A step in which this worker would give its state, if anybody needed it."""
        self._giver.get_ready()

    def tidy(self) -> None:
        """A step begins: lets go of what was given."""
        self._giver.tidy()

    def close(self, patience_s: float) -> None:
        """Ends what is still given, after so long at most."""
        self._giver.close(patience_s)

    def move(self, asked: TransferAsked) -> str:
        """Sends or receives state, or loads it; returns why that failed, or ""."""
        self._talk.show("SYNCING")
        began = time.perf_counter()
        failure = self._mover.move(asked) if asked.checkpoint is None else self._restore(asked)
        if not (failure or asked.sends):
            self._talk.went_back(asked.step)
        if self._timeline is not None:
            self._timeline.span("send state" if asked.sends else "receive state", began)
        self._talk.show("IDLE")
        return failure

    def _restore(self, asked: TransferAsked) -> str:
        """Loads a checkpoint that the line goes back to."""
        read, restore = asked.checkpoint, self._candidate.restore
        assert read is not None
        try:
            if restore is None:
                raise CheckpointRefused("this worker reads no checkpoints")
            restore(Path(read.folder), read.head)
        except CheckpointRefused as error:
            log.error(LogEvent("checkpoint_not_loaded", str(error)))  # noqa: TRY400 (it says all)
            return str(error)
        text = f"the line went back to step {asked.step}: its checkpoint is loaded from "
        log.warning(LogEvent("went_back", f"{text}{read.folder}", step=asked.step))
        self._talk.wrote(read)
        return ""
