"""`andon history`: lists the runs under runs/ by their journals, newest first."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.host.errors import ExitCode
from andon_cli.book import RunBook, halt_fields
from andon_cli.questions import HistoryConfig
from andon_cli.texts import aligned, halted_line
from andon_coordinator.transport.reader import RecordedHalt
from andon_coordinator.transport.store import JournalError
from andon_server.runs import JOURNAL, RUNS, service_of

__all__ = ["PastRun", "history_json", "history_lines", "read_runs", "show_history"]

_HEADINGS = ("run", "started", "steps", "loss", "accuracy", "workers", "halts", "state")
_HALTS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run; `state` is complete, drained, halted, running, stopped, or unreadable.

    `loss` is None before the first step and where it was not a number.
    """

    run_id: str
    folder: Path
    state: str
    started_unix_s: float = 0.0
    steps: int = 0
    loss: float | None = None
    accuracy: float | None = None
    """The share of correct samples in the last step, from 0 to 1; None if nobody counted."""
    workers: int = 0
    halts: tuple[RecordedHalt, ...] = ()
    gaps: int = 0
    """How often records are missing: the journal lost its end, or was replaced by an older copy."""
    last_gap_step: int = 0
    """The step before which they are missing last."""
    problem: str = ""


def show_history(config: HistoryConfig) -> int:
    """Lists the runs. Returns the exit code."""
    runs = read_runs(RUNS)
    if config.format == "json":
        print(history_json(runs))
    elif not runs:
        print(f"there is no run under {RUNS}/ here")
    else:
        print("\n".join(history_lines(runs)))
    return ExitCode.COMPLETE


def read_runs(runs: Path) -> list[PastRun]:
    """All runs under `runs`, newest first."""
    found = [_read_run(journal.parent) for journal in runs.glob(f"*/{JOURNAL}")]
    return sorted(found, key=lambda run: (run.started_unix_s, run.run_id), reverse=True)


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
            lines.append(f"      {earlier} earlier halts: andon history --format json")
        lines += [f"      {_halt(halt)}" for halt in run.halts[-_HALTS_SHOWN:]]
    return lines


def history_json(runs: list[PastRun]) -> str:
    """The runs as one line of JSON, newest first."""
    return json.dumps([_fields(run) for run in runs])


def _read_run(folder: Path) -> PastRun:
    try:
        book = RunBook.read(folder / JOURNAL)
    except JournalError as error:
        return PastRun(run_id=folder.name, folder=folder, state="unreadable", problem=f"{error}")
    return PastRun(
        run_id=book.run.run_id,
        folder=folder,
        state=_state(book, folder),
        started_unix_s=book.run.created_at_unix_s,
        steps=book.steps,
        loss=book.last_loss,
        accuracy=book.last_accuracy,
        workers=book.most_workers,
        halts=tuple(book.halts),
        gaps=book.gaps[0],
        last_gap_step=book.gaps[1],
    )


def _state(book: RunBook, folder: Path) -> str:
    service = service_of(folder)
    alive = service is not None and service.alive
    if book.complete and (book.everybody_went or not alive):
        return "drained" if book.drained else "complete"
    if book.unanswered:
        return "halted"
    return "running" if alive else "stopped"


def _row(run: PastRun) -> tuple[str, ...]:
    if run.problem:
        return (run.run_id, *["-"] * (len(_HEADINGS) - 2), run.state)
    return (
        run.run_id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix_s)),
        str(run.steps),
        "-" if run.loss is None else f"{run.loss:.3f}",
        "-" if run.accuracy is None else f"{run.accuracy * 100:.1f} %",
        str(run.workers),
        str(len(run.halts)),
        run.state,
    )


def _halt(halt: RecordedHalt) -> str:
    said = halted_line(halt.evidence)
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
        "steps": run.steps,
        "loss": run.loss,
        "accuracy": run.accuracy,
        "workers": run.workers,
        "halts": [halt_fields(halt) for halt in run.halts],
        "gaps": run.gaps,
        "last_gap_step": run.last_gap_step,
        "problem": run.problem,
    }
