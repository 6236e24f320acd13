"""Watching: follows a line from status to status, also while its service is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from itertools import islice
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from andon.host.errors import LineUnreachable
from andon_cli.client import LineClient, LineStatus
from andon_cli.drawing.picture import Lost
from andon_cli.drawing.seen import Happening, Seen, happening_of
from andon_cli.questions import LineCommand
from andon_cli.target import Target, find_target
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import JournalReader
from andon_server.runs import JOURNAL, RUNS, ServiceAddress, service_of

__all__ = [
    "RECONNECT_S",
    "Watcher",
    "can_draw",
    "flags_of",
    "remembered",
    "service_here",
    "statuses",
]

RECONNECT_S = 300.0
"""A watcher tries so long to reach a service that went away, as a worker does."""
_TRY_EVERY_S = 1.0
_DRAW_EVERY_S = 0.2
_LOSSES_READ = 500
_EVENTS_READ = 10


async def statuses(config: LineCommand) -> AsyncGenerator[LineStatus | Lost]:
    """The statuses of a line, until the run is over.

    While the service is away, a `Lost` comes every second. A service that starts again is found by
    its run, wherever it listens then.

    Raises:
        LineUnreachable: nobody served the line to begin with, or for `RECONNECT_S` seconds.
        CommandError: the line refuses, or another run is served there.
    """
    last: LineStatus | None = None
    lost: Lost | None = None
    while True:
        problem = ""
        try:
            target = _target(config, last)
            problem = f"the service at {target.address} does not answer any more"
            async with LineClient(target.address, run_id=target.run_id, access=config.access) as it:
                async for status in it.watch():
                    last, lost = status, None
                    yield status
        except LineUnreachable as error:
            if last is None:
                raise
            problem = problem or str(error)
        if last is not None and last.state == "COMPLETE":
            return
        now = time.monotonic()
        lost = Lost(problem, *((lost.since, lost.until) if lost else (now, now + RECONNECT_S)))
        if now >= lost.until:
            raise LineUnreachable(problem)
        yield lost
        await asyncio.sleep(_TRY_EVERY_S)


def can_draw(console: Console) -> bool:
    """Whether the console is a terminal on which a picture can be drawn again and again."""
    return console.is_terminal and not console.is_dumb_terminal


def flags_of(config: LineCommand) -> str:
    """The flags by which another command finds the line that this one was told to ask."""
    named = [("--address", config.address), ("--run", config.run)]
    return " ".join(f"{flag} {value}" for flag, value in named if value)


def remembered(journal: Path) -> Seen:
    """What a run's journal knows of the time before the first status."""
    with suppress(JournalError), journal_errors(journal), JournalReader(journal) as reader:
        past = islice(reader.backwards(), _LOSSES_READ)
        steps = [
            (entry.record.step, entry.result.loss) for entry in past if entry.result is not None
        ][::-1]
        events = [happening_of(each) for each in reader.run_events()[-_EVENTS_READ:]]
        losses = [loss for _, loss in steps]
        return Seen(losses, events, first_step=steps[-1][0] if steps else 0)
    return Seen()


def service_here(status: LineStatus, runs: Path = RUNS) -> ServiceAddress | None:
    """The service of a line, if it was started in this folder; else None."""
    service = service_of(runs / status.run_id)
    same = service is not None and service.metrics_url == status.metrics_url and service.alive
    return service if same else None


class Watcher:
    """What a terminal shows of a line while it is followed: what was seen, and if it is lost."""

    def __init__(self, config: LineCommand) -> None:
        """Follows the line that `config` names."""
        self._config = config
        self.seen = Seen()
        self.lost: Lost | None = None
        self.heard_at = 0.0
        """When the last status came, as a monotonic time in seconds."""
        self.board_url = ""

    def take(self, status: LineStatus) -> list[Happening]:
        """Takes a status in. Returns what happened since the one before."""
        if self.seen.last is None and (service := service_here(status)) is not None:
            self.seen = remembered(RUNS / status.run_id / JOURNAL)
            self.board_url = service.board_url
        if self.lost is not None:
            self._tell("back", "the service answers again")
        self.lost, self.heard_at = None, time.monotonic()
        return self.seen.note(status, self.heard_at, time.time())

    def lose(self, lost: Lost) -> None:
        """Notes that the service does not answer, as long as it doesn't."""
        if self.lost is None:
            self._tell("lost", "the service does not answer any more")
        self.lost = lost

    def _tell(self, kind: str, text: str) -> None:
        step = 0 if self.seen.last is None else self.seen.last.step
        self.seen.events.append(Happening(at_unix_s=time.time(), kind=kind, text=text, step=step))

    async def draw(
        self,
        console: Console,
        picture: Callable[[], RenderableType],
        also: Callable[[LineStatus], None] = lambda status: None,
    ) -> None:
        """Draws on the whole terminal until the run is over, and leaves the last picture there.

        Args:
            console: the terminal.
            picture: what to draw, asked several times a second: in the picture time passes even
                if nothing comes from the service, so one that hangs is seen.
            also: is told each status.

        Raises:
            CommandError: as in `statuses`.
        """
        live = Live(get_renderable=picture, console=console, screen=True, auto_refresh=False)
        ticking: asyncio.Task[None] | None = None
        try:
            async with aclosing(statuses(self._config)) as found:
                async for each in found:
                    if ticking is not None and ticking.done():
                        ticking.result()  # what could not be drawn is an error, not a still picture
                    if isinstance(each, Lost):
                        self.lose(each)
                        continue
                    self.take(each)
                    also(each)
                    if ticking is None:
                        live.start()
                        ticking = asyncio.create_task(_refresh(live), name="drawing")
        finally:
            if ticking is not None:
                ticking.cancel()
                live.stop()
                console.print(picture())


async def _refresh(live: Live) -> None:
    while True:
        live.refresh()
        await asyncio.sleep(_DRAW_EVERY_S)


def _target(config: LineCommand, last: LineStatus | None) -> Target:
    """Where the line is now. A service that was started again may listen on another port."""
    if last is None or config.address:
        target = find_target(config.address, config.run)
        return target if last is None else Target(target.address, last.run_id)
    return find_target("", config.run or last.run_id)
