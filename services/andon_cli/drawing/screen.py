"""Screen: a run on a terminal (a board below what is said), or as plain lines elsewhere."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from andon.protocol.halts import HaltEvidence
from andon_cli.client import LineStatus
from andon_cli.drawing.progress import Pace, RunView, board_lines
from andon_cli.drawing.texts import halt_lines, step_line, waiting_line
from andon_cli.drawing.worker_output import Alarms, OutputMode, WorkerOutput, colored

__all__ = ["RunConsole", "Screen", "steps_to_show"]

_ALL_STEPS = 200
"""A run of up to so many steps shows every one."""
_DRAW_EVERY_S = 0.2
"""The board is drawn no more often than this."""
_WAITING_LASTS_S = 0.9
"""A wait is shown once it has lasted so long."""


class RunConsole(Console):
    """A console whose reader may go away (`andon run ... | head`), which ends the run cleanly."""

    def on_broken_pipe(self) -> None:
        """Sends the output nowhere from now on, and interrupts this process."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGHUP)


class Screen:
    """Shows a run. Use it as a context manager; `now` is a monotonic time in seconds."""

    def __init__(self, console: Console, *, on_halt: str, output: OutputMode | None = None) -> None:
        """Shows on `console`, with a board if that is a terminal that can draw one.

        Args:
            console: where to show.
            on_halt: what workers do at a halt, `wait` or `raise`.
            output: what to show of the workers' output. Default: `last` on a board, else `all`.
        """
        self._console = console
        # FORCE_COLOR makes rich take a file for a terminal: a log of CI gets colours, but no board.
        self.has_board = (
            console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        )
        """Whether there is a board, instead of a line for each step."""
        self._on_halt = on_halt
        self._output: OutputMode = output or ("last" if self.has_board else "all")
        self._alarms = Alarms()
        self._workers: dict[int, WorkerOutput] = {}
        self._live = Live(console=console, auto_refresh=False)
        self._title = self._devices = self._logs = ""
        self._status: LineStatus | None = None
        self._flags = ""
        self._pace = Pace()
        self._shown_halt: HaltEvidence | None = None
        self._halted_at = 0.0
        self._shown_step = 0
        self._waiting = (0.0, "", False)
        self._over = False
        self._drawn: tuple[float, int, list[Text]] = (-math.inf, 0, [])
        """When the board was last drawn, how wide the terminal was, and its lines."""

    def __enter__(self) -> Self:
        """The screen itself. The board begins once there is something to show."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the board as it was last, without what is true of a moment only."""
        self._over = True
        if self._live.is_started:
            self._draw(self._drawn[0])
            self._live.stop()

    def entitle(self, title: str) -> None:
        """Says what runs, in the board's first line."""
        self._title = title

    def introduce(self, devices: str, banner: str) -> None:
        """Says what takes part: in the board's first line, or by a `banner` if there is none."""
        self._devices = devices
        if not self.has_board:
            self.say(banner)

    def keep_output_in(self, logs: str) -> None:
        """Says where the whole output of the workers is."""
        self._logs = logs if self._output != "all" else ""

    def say(self, line: str, *, style: str = "") -> None:
        """Prints a line above the board, without markup or wrapping."""
        self._adapt_to_width()
        self._console.print(
            Text(line, style=style), soft_wrap=True, no_wrap=True, crop=False, overflow="ignore"
        )

    def hear(self, slot: int) -> Callable[[str], None]:
        """What takes each line of the process that begins in a worker's slot."""
        worker = self._workers.setdefault(
            slot, WorkerOutput(f"worker {slot}", self._output, self._alarms)
        )
        worker.forget()  # The lines of the process before are not its own.

        def heard(line: str) -> None:
            self._pass_on(slot, worker.take(line))

        return heard

    def worker_ended(self, slot: int, *, failed: bool) -> None:
        """Takes note that a worker's process has ended, and shows why if it failed."""
        if (worker := self._workers.get(slot)) is not None:
            self._pass_on(slot, worker.end(failed=failed))

    def show(self, status: LineStatus, now: float, *, flags: str = "") -> None:
        """Shows a status of the line. `flags` are those of `answer_lines`."""
        self._status, self._flags = status, flags or self._flags
        self._pace.note(status, now)
        self._show_halt(status.halt, flags, now)
        if self.has_board:
            self.draw(now)
        elif any(
            steps_to_show(step, status.total_steps)
            for step in range(self._shown_step + 1, status.step + 1)
        ):
            self.say(step_line(status))
        else:
            self._say_waiting(waiting_line(status), now)
        # A line that was rolled back has fewer steps than were shown: do not show them again.
        self._shown_step = max(self._shown_step, status.step)

    def draw(self, now: float) -> None:
        """Draws the board, unless that was done a moment ago. Call it a few times a second."""
        if self.has_board and now - self._drawn[0] >= _DRAW_EVERY_S:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._adapt_to_width()
        size = self._console.size
        lines = board_lines(self._view(now), size.width, size.height)
        self._drawn = now, size.width, lines
        self._live.update(Group(*lines))
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()

    def _adapt_to_width(self) -> None:
        """Takes away the old board if the terminal is narrower now.

        It has wrapped those lines that are too long for it, so that the board takes more rows than
        rich knows of, and would leave these behind.
        """
        _, before, lines = self._drawn
        width = self._console.size.width
        if not self.has_board or not 0 < width < before:
            return
        rows = sum(max(cell_len(line.plain) - 1, 0) // width for line in lines)
        self._drawn = self._drawn[0], width, []
        if rows:
            up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
            self._console.control(Control(ControlType.CARRIAGE_RETURN, *up * rows))

    def _view(self, now: float) -> RunView:
        status = self._status
        workers = [] if self._output != "last" else sorted(self._workers.items())
        return RunView(
            title=self._title,
            devices=self._devices,
            status=status,
            eta_s=self._pace.eta_s(status) if status is not None else None,
            workers=[(worker.name, worker.last) for _, worker in workers],
            halted_s=max(now - self._halted_at, 0.0),
            flags=self._flags,
            waits=self._on_halt == "wait",
            logs=self._logs,
            over=self._over,
        )

    def _pass_on(self, slot: int, lines: list[str]) -> None:
        for line in lines:
            self.say(f"[worker {slot}] {colored(line) if self.has_board else line}")

    def _show_halt(self, halt: HaltEvidence | None, flags: str, now: float) -> None:
        """Shows each halt once, and then that it was answered."""
        shown, self._shown_halt = self._shown_halt, halt
        if halt is None:
            if shown is not None:
                self.say(f"resumed: step {shown.step}", style="bold")
                for worker in self._workers.values():
                    worker.forget()  # That it waits for the operator is over.
        elif shown is None or shown.id != halt.id:
            self._halted_at = now
            for line in halt_lines(halt, on_halt=self._on_halt, flags=flags):
                self.say(line, style="bold red")
            if self.has_board:
                self._console.bell()

    def _say_waiting(self, waiting: str, now: float) -> None:
        """Says what the line waits for, once that has lasted: a healthy line waits for moments."""
        since, last, said = self._waiting
        if waiting != last:
            self._waiting = (now, waiting, False)
        elif waiting and not said and now - since >= _WAITING_LASTS_S:
            self._waiting = (since, waiting, True)
            self.say(waiting)


def steps_to_show(step: int, total_steps: int | None) -> bool:
    """Whether a step gets a line: every step of a short run, one in a hundred of a long one."""
    if total_steps is None:
        return step <= _ALL_STEPS or step % 10 ** (len(str(step)) - 2) == 0
    if total_steps <= _ALL_STEPS or step == total_steps:
        return True
    return step % max(total_steps // 100, 1) == 0 or step == 1
