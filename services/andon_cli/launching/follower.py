"""Follower: watches a line and shows what it does, until it is closed."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

from andon.host.errors import CommandError
from andon.host.tls import host_of, is_loopback
from andon_cli.client import LineClient, LineStatus
from andon_cli.config import RunConfig
from andon_cli.drawing.screen import Screen
from andon_cli.drawing.texts import device_summary, hardware_line, schedule_line
from andon_cli.target import served_here
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import JournalReader
from andon_server.runs import RUNS, ServiceAddress

__all__ = ["Follower", "join_hint"]

_RECONNECT_S = 0.5
_ALL_STEPS = 200
"""A run of up to so many steps shows every one."""


class Follower:
    """Shows the banner once the workers are on the line, then every change."""

    def __init__(self, config: RunConfig, line: ServiceAddress, screen: Screen) -> None:
        """Starts to watch."""
        self._config = config
        self._line = line
        self._screen = screen
        self._banner_shown = False
        self._last: LineStatus | None = None
        board = f"  board {line.board_url}" if line.board_url else ""
        screen.entitle(f"run {line.run_id}{board}")
        self._hint = join_hint(line.advertised)
        service = config.service
        if service is not None and service.workers > config.settings.workers:
            # The line waits for others, so whoever starts them needs its address now.
            screen.say(
                self._hint or f"others here join with: andon run --join {line.address} SCRIPT"
            )
            self._hint = ""
        self._task = asyncio.create_task(self._follow(), name="follower")
        self.joined = False
        """Whether any worker was ever seen on the line."""
        self._before = 0
        """Steps that the line had before any worker was here: of a run that is resumed."""
        self._noted = asyncio.Condition()
        """Notified of each status."""
        self._live_at: dict[int, float] = {}
        """When each slot was last seen live, as a monotonic time in seconds."""
        self._step_of: dict[int, int] = {}
        """The last step that each slot was seen to have while it took part in a round."""

    @property
    def complete(self) -> bool:
        """Whether the line was complete in the last status."""
        return self._last is not None and self._last.state == "COMPLETE"

    @property
    def trained(self) -> bool:
        """Whether the line had committed a step by the last status; of a resumed run, a new one."""
        return self._last is not None and self._last.step > self._before

    @property
    def step(self) -> int:
        """Steps committed by the last status."""
        return 0 if self._last is None else self._last.step

    @property
    def runs(self) -> bool:
        """Whether the line was taking steps in the last status."""
        return self._last is not None and self._last.state == "RUNNING"

    def was_live_since(self, slot: int, moment: float) -> bool:
        """Whether the worker in a slot was seen on the line after a monotonic time in seconds."""
        return self._live_at.get(slot, 0.0) > moment

    def step_of(self, slot: int) -> int:
        """The last step that the worker in a slot was seen to have while it took part."""
        return self._step_of.get(slot, 0)

    async def is_beyond(self, step: int) -> None:
        """Returns once the line has committed more than `step` steps."""
        async with self._noted:
            await self._noted.wait_for(lambda: self.step > step)

    async def close(self) -> None:
        """Stops watching. Shows the banner if no worker ever arrived."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.show_banner()

    def show_banner(self, status: LineStatus | None = None) -> None:
        """Shows once what runs, where, on which devices, and how their work is divided."""
        if self._banner_shown:
            return
        self._banner_shown = True
        workers = [each for each in status.workers if each.live] if status is not None else []
        threads = os.environ.get("OMP_NUM_THREADS") or "1"
        devices = [worker.device for worker in workers]
        summary = device_summary(devices or [""] * self._config.settings.workers, threads)
        line = self._line
        board = f"board {line.board_url}  " if line.board_url else ""
        where = f"coordinator {line.advertised or line.address}  {board}metrics {line.metrics_url}"
        self._screen.introduce(summary, f"run {line.run_id}  {where}  {summary}")
        if hardware := hardware_line(workers):
            self._screen.say(hardware)
        if status is not None and (schedule := schedule_line(status)):
            self._screen.say(schedule)
        if self._hint:
            self._screen.say(self._hint)

    async def _follow(self) -> None:
        async with LineClient(self._line.address, access=self._config.settings.access) as client:
            while True:
                # The service may be starting again, or gone. The launch watches its process and
                # finds out which; all that is left to do here is to try again.
                with suppress(CommandError):
                    async for status in client.watch():
                        self._note(status)
                        async with self._noted:
                            self._noted.notify_all()
                await asyncio.sleep(_RECONNECT_S)

    def _note(self, status: LineStatus) -> None:
        self.joined = self.joined or status.live > 0 or status.step > 0
        self._live_at.update(
            {worker.worker: time.monotonic() for worker in status.workers if worker.live}
        )
        self._step_of.update(
            {
                each.worker: each.step
                for each in status.workers
                if each.live and each.rank is not None
            }
        )
        if self._last is None and not status.live:
            self._before = status.step
        if status.step > self._before or status.state == "RUNNING":
            self.show_banner(status)
        self._fill_gap(status)
        self._screen.show(status, time.monotonic(), flags=self._flags_of(status))
        self._last = status

    def _flags_of(self, status: LineStatus) -> str:
        """The flags by which `andon resume` finds this run, if a new halt is about to be shown."""
        shown = self._last.halt if self._last is not None else None
        if status.halt is None or (shown is not None and shown.id == status.halt.id):
            return ""
        service = self._config.service
        if service is None or service.folder.absolute().parent != RUNS.absolute():
            return f"--address {self._line.address}"
        return f"--run {self._line.run_id}" if len(served_here()) > 1 else ""

    def _fill_gap(self, status: LineStatus) -> None:
        """Shows the steps that passed between two statuses, in a short run without a board.

        Statuses skip steps if those are quick. The journal has them all."""
        last_step = self._last.step if self._last is not None else self._before
        short = (status.total_steps or status.step) <= _ALL_STEPS
        if self._screen.has_board or not self._line.journal or not short:
            return
        if status.step - last_step < 2:
            return
        journal = Path(self._line.journal)
        with suppress(JournalError), journal_errors(journal), JournalReader(journal) as book:
            for entry in book.chain():
                if entry.result is None or not last_step < entry.record.step < status.step:
                    continue
                past = LineStatus(
                    run_id=status.run_id,
                    state=status.state,
                    step=entry.record.step,
                    loss=entry.result.loss,
                    samples=entry.result.samples,
                    correct=entry.result.correct,
                    total_steps=status.total_steps,
                    samples_per_second=entry.result.samples / max(entry.result.seconds, 1e-9),
                )
                self._screen.show(past, time.monotonic())


def join_hint(advertised: str) -> str:
    """How other hosts join a line that they reach at `advertised`; empty if they can't."""
    if not advertised or is_loopback(host_of(advertised)):
        return ""
    return f"other hosts join with: andon run --join {advertised} SCRIPT"
