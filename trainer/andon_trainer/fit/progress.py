"""A progress bar, on the main worker's terminal."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from andon_trainer.fit.callbacks import Callback, Evaluation, Step
from andon_trainer.line.line import Line

__all__ = ["ProgressBar"]

_REFRESH_S = 0.1


class ProgressBar(Callback):
    """Shows steps, losses and throughput while its `with` block runs.

    Several workers may share a terminal, so only the main worker's bar is visible. The main worker
    can be another one after each step.
    """

    def __init__(self, total: int | None, *, wanted: bool | None, console: Console | None = None):
        """Shows nothing yet.

        Args:
            total: number of steps in the run; None: not known.
            wanted: whether to show it; None: if there is a terminal.
            console: where it is shown; None: the standard error output.
        """
        console = console or Console(stderr=True)
        self._enabled = console.is_terminal if wanted is None else wanted
        self._line: Line | None = None
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            # Without a thread of its own: loading processes may be forked while the bar is shown.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("step", total=total, facts="")
        self._total = total
        self._shown = False
        self._refreshed = -math.inf
        self._evaluated = ""

    def __enter__(self) -> Self:
        """The bar; it shows itself with the first step."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the terminal back, also after an exception."""
        self._show(wanted=False)

    def on_start(self, line: Line, model: nn.Module) -> None:
        """Notes where to ask which worker is the main one."""
        self._line = line

    def on_step(self, step: Step) -> None:
        """Moves on."""
        if not self._enabled:
            return
        assert self._line is not None
        self._show(wanted=self._line.is_main)
        rate = f"{step.samples_per_second:,.0f} samples/s".replace(",", " ")
        facts = f"loss {step.loss:.4g}  {rate}{self._evaluated}"
        now = time.monotonic()
        due = now - self._refreshed >= _REFRESH_S or step.number == self._total
        self._refreshed = now if due else self._refreshed
        self._progress.update(self._task, completed=step.number, facts=facts, refresh=due)

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """Notes the latest evaluation, which is shown from then on."""
        values = {"loss": evaluation.loss, **evaluation.metrics}
        facts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._evaluated = f"  [evaluated: {facts}]".replace("[", "\\[")

    def _show(self, *, wanted: bool) -> None:
        if wanted and not self._shown:
            self._progress.start()
        elif self._shown and not wanted:
            self._progress.stop()
        self._shown = wanted
