"""Checkpoints: when a run writes one, and where."""

from __future__ import annotations

from pathlib import Path

from andon.records import Cursor
from andon_trainer.replica import Replica

__all__ = ["Checkpoints"]


class Checkpoints:
    """A run's folder of checkpoints, as one worker writes it."""

    def __init__(self, run_dir: Path | None, every: int) -> None:
        """Writes nothing yet.

        Args:
            run_dir: the run's folder; None if it has none, and then `every` is 0.
            every: commits from one checkpoint to the next; 0 is never.
        """
        self._run_dir = run_dir
        self._every = every
        self._written = 0
        self.last: Path | None = None
        """The folder that was written last."""

    def due(self, step: int) -> bool:
        """Whether the commit of `step` wants a checkpoint that was not written yet."""
        every = self._every
        return bool(every and step and step % every == 0 and step != self._written)

    def write(self, replica: Replica, step: int, cursor: Cursor) -> None:
        """Writes the checkpoint of `step`, whole or not at all."""
        assert self._run_dir is not None
        self._written = step
        self.last = replica.save(self._run_dir / "checkpoints" / f"step-{step:08d}", step, cursor)
