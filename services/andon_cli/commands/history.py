"""`andon history`: lists the runs under runs/ by their journals, newest first."""

from __future__ import annotations

import time
from typing import Any

from andon.host.errors import ExitCode
from andon.host.strict_json import strict_json
from andon.protocol.limits import on_one_line
from andon_cli.drawing.texts import aligned, duration, halted_line
from andon_cli.questions import HistoryConfig
from andon_coordinator.transport.reader import RecordedHalt
from andon_server.book import halt_fields
from andon_server.past_runs import PastRun, read_runs
from andon_server.runs import RUNS

__all__ = ["halt_line", "history_json", "history_lines", "show_history"]

_HEADINGS = (
    *("run", "started", "took", "steps", "epoch", "loss", "accuracy", "workers", "halts"),
    "state",
)
_HALTS_SHOWN = 3


def show_history(config: HistoryConfig) -> int:
    """Lists the runs. Returns the exit code."""
    runs = read_runs(RUNS)
    if config.format == "json":
        print(history_json(runs))
    elif not runs:
        print(f"there is no run under {RUNS}/ here")
    else:
        print("\n".join(map(on_one_line, history_lines(runs))))
    return ExitCode.COMPLETE


def history_lines(runs: list[PastRun]) -> list[str]:
    """The table of runs. Below each run are its last halts and their answers."""
    first, *rows = aligned([_HEADINGS, *(_row(run) for run in runs)])
    lines = [first]
    for row, run in zip(rows, runs, strict=True):
        lines.append(row)
        if run.problem:
            lines.append(f"      {run.problem}")
        if run.gaps:
            lines.append(
                f"      its journal lacks steps before step {run.last_gap_step}: it lost its end, "
                "or an older copy was put in its place"
            )
        if earlier := len(run.halts[:-_HALTS_SHOWN]):
            lines.append(f"      {earlier} earlier halts: andon show {run.run_id}")
        lines += [f"      {halt_line(halt)}" for halt in run.halts[-_HALTS_SHOWN:]]
    return lines


def history_json(runs: list[PastRun]) -> str:
    """The runs as one line of JSON, newest first."""
    return strict_json([_fields(run) for run in runs])


def _row(run: PastRun) -> tuple[str, ...]:
    if run.problem:
        return (run.run_id, *["-"] * (len(_HEADINGS) - 2), run.state)
    return (
        run.run_id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix_s)),
        duration(run.seconds) if run.steps else "-",
        str(run.steps),
        _epoch(run),
        "-" if run.loss is None else f"{run.loss:.3f}",
        "-" if run.accuracy is None else f"{run.accuracy * 100:.1f} %",
        str(run.workers),
        str(len(run.halts)),
        run.state,
    )


def _epoch(run: PastRun) -> str:
    """The epoch of the last step, and how many the script makes: `2 of 10` is the third of ten."""
    if run.epoch is None:
        return "-"
    return str(run.epoch) if run.total_epochs is None else f"{run.epoch} of {run.total_epochs}"


def halt_line(halt: RecordedHalt) -> str:
    """A halt and its answer in one line."""
    said = halted_line(halt.evidence)
    if halt.ended_session:
        return f"{said} It ended the session."
    if halt.answer is None:
        return f"{said} {'Not answered' if halt.is_open else 'Its answer is not recorded'}."
    answer = halt.answer.name.lower()
    who = f" by {halt.operator}" if halt.operator else ""
    dropped = f" {halt.worker}" if answer == "drop" else ""
    return f"{said} Answered{who}: {answer}{dropped}."


def _fields(run: PastRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "folder": str(run.folder),
        "state": run.state,
        "started_unix_s": run.started_unix_s,
        "seconds": run.seconds,
        "steps": run.steps,
        "epoch": run.epoch,
        "total_epochs": run.total_epochs,
        "loss": run.loss,
        "accuracy": run.accuracy,
        "workers": run.workers,
        "halts": [halt_fields(halt) for halt in run.halts],
        "gaps": run.gaps,
        "last_gap_step": run.last_gap_step,
        "problem": run.problem,
    }
