"""Report: what came of every check, for people as it is known, and for programs at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from andon_cli.conformance.runner.checks import Result

__all__ = ["line_of", "report_json", "summary"]

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


def report_json(results: Sequence[Result], *, target: str) -> str:
    """All of it as one line of JSON."""
    return json.dumps(
        {
            "conforms": all(result.outcome != "fail" for result in results),
            "target": target,
            "checks": [asdict(result) for result in results],
        }
    )
