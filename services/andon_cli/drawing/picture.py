"""Picture: a line at one moment, as `andon status --watch` draws it on a terminal.

It fits the terminal: where that is narrow, the table drops its least important columns, and where
it is low, workers of which there is nothing to tell. No fact is told by colour alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from andon.protocol.limits import on_one_line
from andon_cli.client import LineStatus, WorkerStatus
from andon_cli.drawing.seen import Seen
from andon_cli.drawing.texts import (
    accuracy_text,
    answer_lines,
    duration,
    grouped,
    halted_line,
    late_line,
    late_worker,
    schedule_line,
    short_time,
    sparkline,
    waiting_line,
)

__all__ = [
    "Column",
    "Light",
    "LinePicture",
    "Lost",
    "device_of",
    "fitted_table",
    "headline",
    "light_of",
    "light_of_worker",
    "lost_lines",
    "step_text",
]

_SILENT_S = 3.0
"""The service sends a status every second. After so long without one, something hangs."""
_SPARK_CELLS = 40
_BAR_CELLS = 40
_EVENTS_SHOWN = 5
_FEWEST_WORKERS = 3
"""So many workers are shown even on the lowest terminal."""

_GAP = 2
"""Between two columns."""

_STATE_STYLES = {
    "RUNNING": "bold green",
    "COMPLETE": "bold green",
    "FORMING": "bold yellow",
    "SYNCING": "bold yellow",
    "DRAINING": "bold yellow",
    "HALTED": "bold red",
}
_EVENT_STYLES = {
    "halted": "red", "convicted": "red", "lost": "red", "dropped": "red",
    "checkpoint_missed": "yellow", "attempt": "yellow", "arithmetic": "yellow",
    "went_back": "yellow", "session_over": "yellow", "complete": "green",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lost:
    """The service does not answer any more."""

    problem: str
    since: float
    """A monotonic time in seconds."""
    until: float
    """When the watcher gives up, likewise."""


@dataclass(frozen=True, slots=True)
class Light:
    """A light of the board; its sign tells it apart where there is no colour."""

    sign: str
    plain: str
    """The sign where there is ASCII alone."""
    style: str

    def text(self, *, ascii_only: bool) -> Text:
        """The light as one cell."""
        return Text(self.plain if ascii_only else self.sign, style=self.style)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table on a terminal."""

    name: str
    expendable: int = 0
    """Where there is no room, columns with the highest number go first; 0: never."""
    right: bool = False


_GREEN = Light("●", "o", "green")
_AMBER = Light("◐", "~", "yellow")
_RED = Light("■", "X", "bold red")
_OFF = Light("○", ".", "dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePicture:
    """What a terminal shows of a line at `now`, a monotonic time in seconds."""

    seen: Seen
    now: float
    at_unix_s: float
    """The same moment by the calendar."""
    heard_at: float
    """When the last status came."""
    lost: Lost | None = None
    flags: str = ""
    """Those of `answer_lines`."""
    address: str = ""
    board_url: str = ""
    """Where the same is shown in a browser; empty: nowhere that is known."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it for the width and the height that there is."""
        ascii_only, width = options.ascii_only, options.max_width
        status = self.seen.last
        if status is None:
            yield Text(f"asking {self.address} ...")
            return
        silent_s = self.now - self.heard_at
        top: list[RenderableType] = [headline(status, silent_s, self.lost, ascii_only=ascii_only)]
        if self.lost is not None:
            yield from (*top, *lost_lines(status, self.lost, silent_s, self.now), *self._events())
            return
        top += _halt_lines(status, self.flags, self.at_unix_s)
        if waiting := waiting_line(status):
            top.append(Text(waiting, style="yellow"))
        top += [*self._progress(status, width, ascii_only=ascii_only), Text()]
        below = [*self._remarks(status), *self._events()]
        used = sum(len(console.render_lines(each, options)) for each in (*top, *below))
        rows = max(_FEWEST_WORKERS, options.size.height - used - 2)
        # What is old by now is not shown in green.
        lights = dict.fromkeys((each.worker for each in status.workers), _OFF)
        if silent_s <= _SILENT_S:
            late = late_worker(status)
            lights = {each.worker: light_of_worker(each, status, late) for each in status.workers}
        table = _workers(status, lights, width, rows, ascii_only=ascii_only)
        yield from (*top, *table, *below)

    def _progress(self, status: LineStatus, width: int, *, ascii_only: bool) -> list[Text]:
        seen, lines = self.seen, [Text(f"step      {step_text(status)}")]
        if status.total_steps:
            cells = max(8, min(_BAR_CELLS, width - 44))
            lines[0].append("  ").append_text(
                _bar(status.step / status.total_steps, cells, ascii_only=ascii_only)
            )
            lines[0].append(f" {100 * status.step / status.total_steps:.0f} %")
        if seen.eta_s is not None and status.state == "RUNNING":
            lines[0].append(f"  eta {duration(seen.eta_s)}")
        if status.loss is not None:
            cells = max(8, min(_SPARK_CELLS, width - 32))
            drawn = sparkline(seen.losses, cells, ascii_only=ascii_only)
            accuracy = "" if status.accuracy is None else f"  {accuracy_text(status.accuracy)}"
            line = Text(f"loss      {status.loss:.3f}  ")
            lines.append(line.append(drawn, style="cyan").append(accuracy))
        if status.samples_per_second > 0:
            parts = [f"{grouped(status.samples_per_second)} samples/s"]
            if seen.step_s is not None:
                parts.append(f"{short_time(seen.step_s)} a step")
            if status.exchange_s > 0:
                hidden = f"{status.hidden_ratio * 100:.0f} % hidden"
                parts.append(f"exchange {short_time(status.exchange_s)} ({hidden})")
            lines.append(Text(f"speed     {'  '.join(parts)}"))
        return lines

    def _remarks(self, status: LineStatus) -> list[Text]:
        lines = []
        if late := late_line(status):
            lines.append(Text(late, style="yellow"))
        if schedule := schedule_line(status):
            lines.append(Text(schedule))
        known = status.checkpoints
        if known is not None and known.overdue:
            lines.append(Text(f"there is no checkpoint of step {known.overdue}", style="yellow"))
        if self.board_url and status.state != "COMPLETE":
            lines.append(Text(f"in a browser: {self.board_url}", style="dim"))
        return lines

    def _events(self) -> list[Text]:
        shown = list(self.seen.events)[-_EVENTS_SHOWN:]
        lines = [
            Text.assemble(
                (f"{_clock(each.at_unix_s)}  ", "dim"),
                (each.text, _EVENT_STYLES.get(each.kind, "")),
                overflow="ellipsis",
                no_wrap=True,
            )
            for each in shown
        ]
        return [Text(), *lines] if lines else []


def headline(status: LineStatus, silent_s: float, lost: Lost | None, *, ascii_only: bool) -> Text:
    """The line's light, its run, and its state. `silent_s` is how long nothing was heard."""
    light, state, style = light_of(status), status.state, _STATE_STYLES.get(status.state, "")
    if lost is not None:
        light, state, style = _OFF, "LOST", "bold red"
    elif silent_s > _SILENT_S:
        light, state, style = _AMBER, f"SILENT for {duration(silent_s)}", "bold yellow"
    line = Text.assemble(
        light.text(ascii_only=ascii_only), f" run {status.run_id}  ", (state, style)
    )
    if lost is None:
        line.append(f"  {status.live} live, {status.participating} participating")
    return line


def lost_lines(status: LineStatus, lost: Lost, silent_s: float, now: float) -> list[Text]:
    """What is said of a line whose service is gone: nothing that may be wrong by now."""
    loss = "" if status.loss is None else f", loss {status.loss:.3f}"
    away, left = duration(silent_s), duration(max(0.0, lost.until - now))
    return [
        Text(lost.problem),
        Text(f"last seen {away} ago: {status.state}, step {step_text(status)}{loss}"),
        Text(f"trying again, for {left} more; Ctrl-C ends this", style="yellow"),
    ]


def light_of(status: LineStatus) -> Light:
    """The line's light: green goes on, amber waits, red is stopped and needs a person."""
    if status.state == "HALTED":
        return _RED
    return _GREEN if status.state in ("RUNNING", "COMPLETE") else _AMBER


def light_of_worker(worker: WorkerStatus, status: LineStatus, late: int | None) -> Light:
    """A worker's light; `late` is the one that the others wait for."""
    if not worker.live:
        return _OFF
    if status.halt is not None:
        seen = worker.worker == status.halt.worker and not status.halt.claimed
        return _RED if seen else _AMBER
    return _AMBER if worker.worker == late or worker.rank is None else _GREEN


_COLUMNS = (
    Column(""), Column("worker", right=True), Column("rank", 5, right=True), Column("host", 4),
    Column("device", 7), Column("state"), Column("step", 3, right=True),
    Column("samples/s", 2, right=True), Column("waits", 1, right=True),
    Column("heartbeat", 6, right=True),
)  # fmt: skip


def _workers(
    status: LineStatus, lights: Mapping[int, Light], width: int, rows: int, *, ascii_only: bool
) -> list[RenderableType]:
    # Where not all fit, leave out those of which there is nothing to tell.
    order = sorted(status.workers, key=lambda each: (lights[each.worker] is _GREEN, each.worker))
    shown = sorted(order if len(order) <= rows else order[: rows - 1], key=lambda each: each.worker)
    if not shown:
        return []
    cells = [[lights[each.worker].text(ascii_only=ascii_only), *_cells(each)] for each in shown]
    table = fitted_table(_COLUMNS, cells, width)
    hidden = len(order) - len(shown)
    return [table, Text(f"... and {hidden} more workers", style="dim")] if hidden else [table]


def fitted_table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """A table of the columns that fit; if even those that are never left out don't, they shrink."""
    widths = [
        max(len(column.name), *(row[at].cell_len for row in rows))
        for at, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while sum(widths[at] + _GAP for at in kept) > width + _GAP:
        least = max(kept, key=lambda at: columns[at].expendable)
        if not columns[least].expendable:
            break
        kept.remove(least)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for at in kept:
        justify: Literal["left", "right"] = "right" if columns[at].right else "left"
        table.add_column(columns[at].name, no_wrap=True, overflow="ellipsis", justify=justify)
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def _cells(worker: WorkerStatus) -> list[Text]:
    state = worker.activity if worker.live else "gone"
    if worker.detail:
        state += f" ({worker.detail})"
    quiet = "" if worker.live else "dim"
    texts = (
        str(worker.worker),
        "-" if worker.rank is None else str(worker.rank),
        worker.host or "-",
        device_of(worker),
        state,
        str(worker.step),
        grouped(worker.samples_per_second),
        f"{worker.waiting_ratio * 100:.0f} %",
        f"{worker.heartbeat_age_s:.1f} s",
    )
    return [Text(on_one_line(each), style=quiet) for each in texts]


def device_of(worker: WorkerStatus) -> str:
    """What it computes on, in words."""
    return (worker.hardware.name if worker.hardware else "") or worker.device or "-"


def _halt_lines(status: LineStatus, flags: str, at_unix_s: float) -> list[Text]:
    if status.halt is None:
        return []
    asked_s = at_unix_s - status.halt.at_unix_s if status.halt.at_unix_s else 0.0
    since = f" It has waited {duration(asked_s)} for an answer." if asked_s > 0 else ""
    lines = [Text(halted_line(status.halt) + since, style="bold red")]
    return lines + [Text(line) for line in answer_lines(status.halt, flags=flags)]


def _bar(ratio: float, cells: int, *, ascii_only: bool) -> Text:
    filled = min(max(int(ratio * cells), 0), cells)
    done, rest = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble((done * filled, "green"), (rest * (cells - filled), "dim"))


def step_text(status: LineStatus) -> str:
    """The step, and of how many: `118/1000`."""
    return f"{status.step}" + (f"/{status.total_steps}" if status.total_steps else "")


def _clock(at_unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_unix_s))
