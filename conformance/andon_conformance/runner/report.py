"""Report: what came of every check, for people as it is known, and for programs at the end."""

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
    """One check on a line; one that failed with what was expected and what came."""
    line = f"{_MARKS[result.outcome]:<4}  {result.name:<22} {result.claim} [{result.rule}]"
    if result.outcome == "fail":
        return f"{line}\n        expected  {result.expected}\n        came      {result.came}"
    return f"{line}: {result.came}" if result.outcome == "skipped" else line


def summary(results: Sequence[Result]) -> str:
    """How many of which."""
    counts = Counter(result.outcome for result in results)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"


def last_words(log: Path) -> str:
    """The end of what the server printed, and where all of it is."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()[-_TAIL_LINES:]
    shown = "".join(f"\n    | {line}" for line in lines)
    return f"the server printed at last (all of it: {log}):{shown or ' nothing'}"


def report_json(results: Sequence[Result], *, target: str, log: Path | None = None) -> str:
    """All of it as one line of JSON; `log` has what the server printed."""
    return json.dumps(
        {
            "conforms": all(result.outcome != "fail" for result in results),
            "target": target,
            "server_log": None if log is None else str(log),
            "checks": [asdict(result) for result in results],
        }
    )
