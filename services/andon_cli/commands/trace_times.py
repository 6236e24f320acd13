"""`andon trace`: where the workers' time went, as a table, and one trace out of several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.host.errors import ExitCode
from andon.host.trace import EventKind, Track
from andon_cli.commands.rank_times import RankTime, rank_lines
from andon_cli.commands.trace import Trace, TraceUnreadable, read_traces
from andon_cli.drawing.texts import aligned, duration
from andon_cli.questions import TraceConfig

__all__ = ["WorkerTime", "ranks_of", "show_trace", "times_of"]

_PARTS = {
    "compute": "compute",
    "data": "data",
    "wait for averages": "averages",
    "wait for commit": "commit",
    "wait for work": "work",
}
"""Spans of the script's thread that do not overlap, and the column that each is counted in."""
_HEADINGS = ("worker", "steps", "void", "time", *_PARTS.values(), "other", "longest wait")


@dataclass(slots=True)
class WorkerTime:
    """Where the time of one worker went."""

    worker: str
    steps: int = 0
    """Committed."""
    void: int = 0
    """Attempts that were not committed."""
    seconds: float = 0.0
    """From its first step's assignment to its last step's end."""
    spent: Counter[str] = field(default_factory=Counter)
    """Microseconds of each part."""
    longest_wait_s: float = 0.0
    longest_wait: str = ""
    """What it waited for then, and in which step; empty if it never waited."""

    @classmethod
    def of(cls, worker: str, spans: Sequence[dict[str, Any]]) -> WorkerTime:
        """The time of a worker by the spans of its script's thread."""
        time = cls(worker)
        steps = [each for each in spans if _outcome(each)]
        committed = [_outcome(each) == "committed" for each in steps]
        time.steps, time.void = sum(committed), len(steps) - sum(committed)
        if steps:
            # Not what comes before and after: starting and joining are slow, and happen once.
            begin, end = min(each["ts"] for each in steps), max(map(_end, steps))
            time.seconds = (end - begin) / 1e6
            for each in spans:
                if each["ts"] >= begin and _end(each) <= end:
                    time._add(each)
        return time

    def _add(self, span: dict[str, Any]) -> None:
        part, args = _PARTS.get(span["name"]), span.get("args", {})
        if part is None:
            return
        self.spent[part] += span["dur"]
        seconds = span["dur"] / 1e6
        if part != "compute" and seconds > self.longest_wait_s:
            self.longest_wait_s = seconds
            self.longest_wait = f"{part}, step {args['step']}" if "step" in args else part

    def shares(self) -> dict[str, float]:
        """The share of each part in its time, from 0 to 1.

        `other` is the rest: the optimizer, checkpoints, transfers, and the script itself.
        """
        whole = self.seconds or 1.0
        shares = {part: self.spent[part] / 1e6 / whole for part in _PARTS.values()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def show_trace(config: TraceConfig) -> int:
    """Shows the table, and writes the merged trace if that is wanted. Returns the exit code.

    Raises:
        TraceUnreadable: a file is no trace, or the merged one can't be written.
    """
    trace = read_traces(config.files)
    out = config.settings.out
    if out is not None:
        try:
            trace.write(out)
        except OSError as error:
            raise TraceUnreadable(f"{out} can't be written: {error.strerror}") from None
    times = times_of(trace), ranks_of(trace)
    if config.settings.format == "json":
        print(_json(trace, *times))
    else:
        print("\n".join(_lines(trace, *times, out)))
    return ExitCode.COMPLETE


def times_of(trace: Trace) -> list[WorkerTime]:
    """Where each worker's time went, in the order of the trace."""
    return [
        WorkerTime.of(name, [each for each in spans if each["tid"] == Track.SCRIPT])
        for name, spans in _processes(trace)
        if not _is_rank(name)
    ]


def ranks_of(trace: Trace) -> list[RankTime]:
    """The same of ranks of sessions."""
    return [RankTime.of(name, spans) for name, spans in _processes(trace) if _is_rank(name)]


def _is_rank(name: str) -> bool:
    return name.startswith("rank ")


def _processes(trace: Trace) -> list[tuple[str, list[dict[str, Any]]]]:
    """The name of each process, and its spans."""
    spans: dict[int, list[dict[str, Any]]] = {}
    names: dict[int, str] = {}
    for event in trace.events:
        process = event["pid"]
        if event["ph"] == "M" and event["name"] == "process_name":
            names[process] = event["args"]["name"]
        elif event["ph"] == EventKind.SPAN:
            spans.setdefault(process, []).append(event)
    return [(name, spans.get(process, [])) for process, name in names.items()]


def _outcome(span: dict[str, Any]) -> str:
    """How a step ended; empty if the span is none."""
    return str(span.get("args", {}).get("outcome", ""))


def _end(span: dict[str, Any]) -> int:
    end: int = span["ts"] + span["dur"]
    return end


def _json(trace: Trace, times: Sequence[WorkerTime], ranks: Sequence[RankTime]) -> str:
    workers = [
        {
            "worker": each.worker,
            "steps": each.steps,
            "void": each.void,
            "seconds": each.seconds,
            "shares": each.shares(),
            "longest_wait_s": each.longest_wait_s,
            "longest_wait": each.longest_wait,
        }
        for each in times
    ]
    found: dict[str, Any] = {
        "run": trace.run_id, "clocks": trace.clocks, "notes": trace.notes, "workers": workers,
    }  # fmt: skip
    if ranks:
        found["ranks"] = [each.fields() for each in ranks]
    return json.dumps(found)


def _lines(
    trace: Trace, times: Sequence[WorkerTime], ranks: Sequence[RankTime], out: Path | None
) -> list[str]:
    lines = [f"run {trace.run_id}"] if trace.run_id else []
    if not times and not ranks:
        return [*lines, "the trace is empty"]
    if times:
        lines += aligned([_HEADINGS, *map(_row, times)])
    if ranks:
        lines += rank_lines(ranks)
    lines += [f"{host}: {text}" for host, text in trace.clocks.items()]
    lines += trace.notes
    if out is not None:
        lines.append(f"wrote {out}: open it in https://ui.perfetto.dev or chrome://tracing")
    return lines


def _row(time: WorkerTime) -> tuple[str, ...]:
    seconds = time.longest_wait_s
    wait = f"{1000 * seconds:.0f} ms" if seconds < 1.0 else duration(seconds)
    return (
        time.worker,
        str(time.steps),
        str(time.void),
        duration(time.seconds),
        *(f"{100 * share:.0f} %" for share in time.shares().values()),
        f"{wait} ({time.longest_wait})" if time.longest_wait else "-",
    )
