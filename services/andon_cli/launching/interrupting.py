"""Interrupting: what a launch does with its workers when a person interrupts it.

The first Ctrl-C lets the run write a checkpoint, if it writes any, and only then interrupts the
workers; the second ends them at once.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

from andon.host.errors import ExitCode
from andon.host.manifest import checkpoints_in
from andon_cli.config import RunConfig
from andon_cli.drawing.screen import Screen
from andon_cli.launching.follower import Follower
from andon_cli.launching.processes import Child
from andon_server.process import Interrupts
from andon_server.resuming import checkpoints_written

__all__ = ["WorkerInterrupts"]

_CHECKPOINT_S = 20.0
"""How long a step and its checkpoint may take after Ctrl-C, before workers are interrupted."""
_ASK_EVERY_S = 0.1


class WorkerInterrupts:
    """Passes on to a launch's workers what people want of them. Used on the event loop."""

    def __init__(
        self, config: RunConfig, screen: Screen, interrupts: Interrupts, workers: list[Child]
    ) -> None:
        """Passes nothing on yet.

        Args:
            config: what is run.
            screen: where people see it.
            interrupts: what people want.
            workers: the launch's, which may be others later.
        """
        self._config = config
        self._screen = screen
        self._interrupts = interrupts
        self._workers = workers
        self._checkpointing: asyncio.Task[None] | None = None
        """Waits for the checkpoint of a Ctrl-C."""

    @property
    def verdict(self) -> ExitCode:
        """The verdict after a signal: SIGTERM counts as itself, any other as Ctrl-C."""
        terminated = self._interrupts.number == signal.SIGTERM
        return ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED

    @property
    def grace_s(self) -> float:
        """How much longer workers may take to end, since a checkpoint comes first."""
        return 0.0 if self._checkpointing is None else _CHECKPOINT_S

    def ask_for_checkpoint(self) -> None:
        """Passes SIGUSR1 on. The writer, if here, writes a checkpoint after the current step."""
        for worker in self._workers:
            worker.send(signal.SIGUSR1)

    def pass_on(self, follower: Follower | None, *, first: bool) -> ExitCode:
        """Passes an interrupt on, after a checkpoint if the run writes any; returns the verdict.

        Args:
            follower: knows whether the run is taking steps.
            first: whether nothing has gone wrong before.
        """
        verdict = self.verdict
        self.stop()
        wanted = first and verdict is ExitCode.INTERRUPTED
        run_dir = self._checkpoints_at(follower) if wanted else None
        if first:
            what = "end" if run_dir is None else "write a checkpoint and end"
            self._screen.say(f"interrupted: the workers {what}; once more ends them at once")
        if run_dir is not None:
            self._checkpointing = asyncio.create_task(self._checkpoint_then_interrupt(run_dir))
            return verdict
        self._interrupt()
        return verdict

    def stop(self) -> None:
        """Waits for no checkpoint any more."""
        if self._checkpointing is not None:
            self._checkpointing.cancel()

    def _interrupt(self) -> None:
        """Passes SIGTERM on as itself, and anything else as Ctrl-C."""
        # Whoever is started where SIGINT is ignored goes on ignoring it, and so do the workers.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        terminated = deaf or self.verdict is ExitCode.TERMINATED
        for worker in self._workers:
            worker.send(signal.SIGTERM if terminated else signal.SIGINT)

    def _checkpoints_at(self, follower: Follower | None) -> Path | None:
        """The run's folder if the run writes checkpoints and is taking steps; else None."""
        service = self._config.service
        if service is None or follower is None or not follower.runs:
            return None
        wanted = self._config.settings.checkpoint_every is not None or checkpoints_in(
            service.folder
        )
        return service.folder if wanted else None

    async def _checkpoint_then_interrupt(self, run_dir: Path) -> None:
        """Asks the writer for a checkpoint until one is new or time is up, then interrupts."""
        before = checkpoints_written(run_dir)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CHECKPOINT_S):
                while checkpoints_written(run_dir) <= before:
                    # Ask repeatedly: rank 0 ignores a request at a step that it has just saved.
                    self.ask_for_checkpoint()
                    await asyncio.sleep(_ASK_EVERY_S)
        self._interrupt()
