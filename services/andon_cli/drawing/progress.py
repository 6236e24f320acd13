"""Progress: what the board of a run shows on a terminal, as lines that fit it.

run 7f3a  RUNNING  http://127.0.0.1:9400/  2 workers on cpu (1 thread each)
[#####---------------]  12 %  step  118/1000  eta 1m12s
loss 2.413  1 204 samples/s  exchange 6 ms (81 % hidden)
worker 0  epoch 0: 118 batches
worker 1  epoch 0: 118 batches
all output: runs/7f3a/worker-N.log
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from andon.protocol.halts import HaltEvidence
from andon_cli.client import LineStatus
from andon_cli.drawing.texts import (
    bar,
    duration,
    measured_parts,
    step_text,
    waiting_line,
)
from andon_server.halt_words import answers_to

__all__ = ["Pace", "RunView", "board_lines"]

_LONGEST_BAR = 40
_SHORTEST_BAR = 10
_WINDOW = 60
"""The pace is that of the last so many steps, or seconds with a step, whichever is longer."""
_STYLES = {"RUNNING": "bold green", "HALTED": "bold white on red", "COMPLETE": "bold green"}


class Pace:
    """How long a step takes, without the time in which the line did not run."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._trained_s = 0.0
        self._seen_at: float | None = None
        """When the line was last seen running; None: it does not run."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        """Seconds of training at which a step was first seen, at most one a second."""

    def note(self, status: LineStatus, now: float) -> None:
        """Takes a status at a monotonic time, in seconds."""
        if status.state != "RUNNING" or status.step == 0:
            self._seen_at = None
            return
        if self._seen_at is not None:
            self._trained_s += now - self._seen_at
        self._seen_at = now
        if self._samples and status.step < self._samples[-1][1]:
            self._samples.clear()  # The line was rolled back.
        last_s, last_step = self._samples[-1] if self._samples else (-math.inf, 0)
        if status.step > last_step and self._trained_s - last_s >= 1.0:
            self._samples.append((self._trained_s, status.step))

    def eta_s(self, status: LineStatus) -> float | None:
        """Seconds to the run's end; None if that is unknown."""
        if not self._samples or not status.total_steps:
            return None
        since, first = self._samples[0]
        if status.step <= first:
            return None
        return (
            (self._trained_s - since) / (status.step - first) * (status.total_steps - status.step)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the board shows at one moment."""

    title: str = ""
    """The run, and the service's board; empty before a service is there."""
    devices: str = ""
    """How many workers on which devices; empty before they are there."""
    status: LineStatus | None = None
    """None before the first one."""
    eta_s: float | None = None
    workers: Sequence[tuple[str, str]] = ()
    """Name and last line of each."""
    halted_s: float = 0.0
    """How long the line has been halted."""
    flags: str = ""
    """What `andon resume` needs to find the run."""
    waits: bool = True
    """Whether a halt waits for an answer; else the workers raise."""
    over: bool = False
    """Whether the run is over, and this is what stays of the board."""
    logs: str = ""
    """Where the whole output of the workers is; empty if it is not kept, or shown."""


def board_lines(view: RunView, width: int, height: int) -> list[Text]:
    """The board in at most `height` lines of at most `width` cells."""
    lines = [_header(view)]
    if view.status is not None:
        lines += _state(view, view.status, width)
    # The line below the board is the cursor's. At least half of the terminal is for what was said.
    room = min(height - 1 - len(lines), max(height // 2, 3))
    lines += _workers(view, max(room, 0))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[: max(height - 1, 1)]


def _header(view: RunView) -> Text:
    line = Text(view.title or "starting the service")
    if view.status is not None and not view.over:
        line.append("  ")
        line.append(view.status.state, _STYLES.get(view.status.state, "bold yellow"))
    if view.devices:
        line.append(f"  {view.devices}")
    return line


def _state(view: RunView, status: LineStatus, width: int) -> list[Text]:
    """How far the run is, and what it does."""
    first = _progress(status, None if view.over else view.eta_s, width)
    if view.over:
        measured = "  ".join(measured_parts(status))
        return [first, Text(measured)] if measured else [first]
    if status.halt is not None:
        return [first, Text(_halted(status.halt, view), "bold white on red")]
    if status.state == "DRAINING" or status.stop_reason:
        why = f": {status.stop_reason}" if status.stop_reason else ""
        return [first, Text(f"the run ends{why}", "yellow")]
    if waiting := waiting_line(status):
        return [first, Text(waiting, "yellow")]
    return [first, Text("  ".join(measured_parts(status)))]


def _progress(status: LineStatus, eta_s: float | None, width: int) -> Text:
    parts = [step_text(status)]
    if not status.total_steps:
        return Text(f"{parts[0]}  epoch {status.epoch}")
    ratio = min(status.step / status.total_steps, 1.0)
    parts.insert(0, f"{int(ratio * 100):3d} %")
    if eta_s is not None and status.step < status.total_steps:
        parts.append(f"eta {duration(eta_s)}")
    text = "  ".join(parts)
    # Leave room for `eta 10m59s`, so that the bar keeps its length.
    room = width - max(len(text), len(parts[0]) + len(parts[1]) + 14) - len("[]  ")
    if room < _SHORTEST_BAR:
        return Text(text)
    return Text.assemble((bar(ratio, min(room, _LONGEST_BAR)), "green"), f"  {text}")


def _halted(halt: HaltEvidence, view: RunView) -> str:
    since = f"HALTED at step {halt.step}, {duration(view.halted_s)} ago"
    if not view.waits:
        return f" {since}: the workers raise LineHalted "
    retry, *others = (each.command for each in answers_to(halt, flags=view.flags))
    options = " | ".join(other.removeprefix(retry).strip() for other in others)
    return f" {since}. Answer: {retry} {f'[{options}] ' if options else ''}"


def _workers(view: RunView, room: int) -> list[Text]:
    """The workers' last lines, as far as there is room, and where the rest is."""
    rest = f"all output: {view.logs}" if view.logs else ""
    shown = list(view.workers)
    if len(shown) + bool(rest) > room:
        shown = shown[: max(room - 1, 0)]
        more = len(view.workers) - len(shown)
        rest = "; ".join(filter(None, [f"{more} more workers" if shown else "", rest]))
    width = max((len(name) for name, _ in shown), default=0)
    lines = [Text.assemble((name.ljust(width), "cyan"), f"  {last}") for name, last in shown]
    return [*lines, Text(rest, "dim")][:room] if rest else lines
