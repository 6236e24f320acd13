"""The runner's report: line by line for people, or as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from andon_conformance.runner.checks import Result

__all__ = ["last_words", "line_of", "report_json", "summary"]

_TAIL_LINES = 12

_MARKS = {"pass": "ok", "fail": "FAIL", "skipped": "skip"}


def line_of(result: Result) -> str:
    """One check as a line; a failed one with what was expected and what came."""
    line = f"{_MARKS[result.outcome]:<4}  {result.name:<22} {result.claim} [{result.rule}]"
    if result.outcome == "fail":
        return f"{line}\n        expected  {result.expected}\n        came      {result.came}"
    return f"{line}: {result.came}" if result.outcome == "skipped" else line


def summary(results: Sequence[Result]) -> str:
    """How many checks passed, failed or were skipped."""
    counts = Counter(result.outcome for result in results)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"


def last_words(log: Path) -> str:
    """The end of the server's output, and where to find the rest."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()[-_TAIL_LINES:]
    shown = "".join(f"\n    | {line}" for line in lines)
    return f"the end of the server's output (all of it: {log}):{shown or ' nothing'}"


def report_json(results: Sequence[Result], *, target: str, log: Path | None = None) -> str:
    """All results as one line of JSON; `log` is the file with the server's output."""
    return json.dumps(
        {
            "conforms": all(result.outcome != "fail" for result in results),
            "target": target,
            "server_log": None if log is None else str(log),
            "checks": [asdict(result) for result in results],
        }
    )
