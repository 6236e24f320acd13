"""Screen: a run's progress on a terminal (a bar below the output) or as plain lines."""

from __future__ import annotations

import math
import os
import signal
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from andon.protocol.halts import HaltEvidence
from andon_cli.client import LineStatus
from andon_cli.texts import halt_lines, step_line, waiting_line

__all__ = ["RunConsole", "Screen", "steps_to_show"]

_ALL_STEPS = 200
"""A run of up to so many steps shows every one."""
_DRAW_EVERY_S = 0.1
"""The bar is drawn no more often than this."""
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

    def __init__(self, console: Console, *, on_halt: str) -> None:
        """Shows on `console`, with a bar if that is a terminal."""
        self._console = console
        self._on_halt = on_halt
        self._shown_halt: HaltEvidence | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._first: tuple[float, int] | None = None
        self._shown_step = 0
        self._waiting = (0.0, "", False)
        self._drawn_at = -math.inf

    def __enter__(self) -> Self:
        """Begins to show the bar."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Removes the bar."""
        self._live.stop()

    def say(self, line: str, *, style: str = "") -> None:
        """Prints a line above the bar, without markup or wrapping."""
        self._console.print(
            Text(line, style=style), soft_wrap=True, no_wrap=True, crop=False, overflow="ignore"
        )

    def show(self, status: LineStatus, now: float, *, flags: str = "") -> None:
        """Shows a status of the line. `flags` are those of `answer_lines`."""
        self._show_halt(status.halt, flags)
        if self._console.is_terminal:
            due = now - self._drawn_at >= _DRAW_EVERY_S
            self._live.update(Text(self._bar_line(status, now), no_wrap=True), refresh=due)
            self._drawn_at = now if due else self._drawn_at
        elif any(
            steps_to_show(step, status.total_steps)
            for step in range(self._shown_step + 1, status.step + 1)
        ):
            self.say(step_line(status))
        else:
            self._say_waiting(waiting_line(status), now)
        # A line that was rolled back has fewer steps than were shown: do not show them again.
        self._shown_step = max(self._shown_step, status.step)

    def _show_halt(self, halt: HaltEvidence | None, flags: str) -> None:
        """Shows each halt once, and then that it was answered."""
        shown, self._shown_halt = self._shown_halt, halt
        if halt is None:
            if shown is not None:
                self.say(f"resumed: step {shown.step}", style="bold")
        elif shown is None or shown.id != halt.id:
            for line in halt_lines(halt, on_halt=self._on_halt, flags=flags):
                self.say(line, style="bold red")

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar, instead of a line for each step."""
        return self._console.is_terminal

    def _say_waiting(self, waiting: str, now: float) -> None:
        """Says what the line waits for, once that has lasted: a healthy line waits for moments."""
        since, last, said = self._waiting
        if waiting != last:
            self._waiting = (now, waiting, False)
        elif waiting and not said and now - since >= _WAITING_LASTS_S:
            self._waiting = (since, waiting, True)
            self.say(waiting)

    def _bar_line(self, status: LineStatus, now: float) -> str:
        if status.step == 0:
            return waiting_line(status) or "starting"
        if self._first is None:
            self._first = (now, status.step)
        since, first_step = self._first
        eta_s = None
        if status.total_steps and status.step > first_step:
            pace_s = (now - since) / (status.step - first_step)
            eta_s = pace_s * (status.total_steps - status.step)
        line = step_line(status, eta_s=eta_s, with_bar=True)
        if waiting := waiting_line(status):
            line += f"  {waiting}"
        return line


def steps_to_show(step: int, total_steps: int | None) -> bool:
    """Whether a step gets a line: every step of a short run, one in a hundred of a long one."""
    if total_steps is None:
        return step <= _ALL_STEPS or step % 10 ** (len(str(step)) - 2) == 0
    if total_steps <= _ALL_STEPS or step == total_steps:
        return True
    return step % max(total_steps // 100, 1) == 0 or step == 1
