"""The reports on a server and on a client, line by line for people, or as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from andon_conformance.judge.checks import Outcome, Verdict
from andon_conformance.judge.trial import PlayedScenario
from andon_conformance.runner.checks import Result

__all__ = [
    "check_line",
    "client_json",
    "client_summary",
    "last_words",
    "scenario_lines",
    "server_json",
    "server_summary",
]

_TAIL_LINES = 12

_MARKS = {"pass": "ok", "fail": "FAIL", "skipped": "skip"}


def check_line(result: Result) -> str:
    """One check as a line; a failed one with what was expected and what came."""
    line = f"{_MARKS[result.outcome]:<4}  {result.name:<22} {result.claim} [{result.rule}]"
    if result.outcome == "fail":
        return f"{line}\n        expected  {result.expected}\n        came      {result.came}"
    return f"{line}: {result.came}" if result.outcome == "skipped" else line


def server_summary(results: Sequence[Result]) -> str:
    """How many checks passed, failed or were skipped."""
    counts = Counter(result.outcome for result in results)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"


def last_words(log: Path) -> str:
    """The end of the server's output, and where to find the rest."""
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    lines = text.splitlines()[-_TAIL_LINES:]
    shown = "".join(f"\n    | {line}" for line in lines)
    return f"the end of the server's output (all of it: {log}):{shown or ' nothing'}"


def server_json(results: Sequence[Result], *, target: str, log: Path | None = None) -> str:
    """All results as one line of JSON; `log` is the file with the server's output."""
    return json.dumps(
        {
            "conforms": all(result.outcome != "fail" for result in results),
            "target": target,
            "server_log": None if log is None else str(log),
            "checks": [asdict(result) for result in results],
        }
    )


_WORDS = {
    Outcome.PASSED: "pass",
    Outcome.FAILED: "FAIL",
    Outcome.SKIPPED: "skip",
    Outcome.UNREACHED: "OPEN",
}
_NAME_WIDTH = 24


def scenario_lines(played: PlayedScenario) -> Iterator[str]:
    """A scenario's checks, a line each, with the evidence where one did not pass."""
    yield f"{played.scenario.name}: {played.scenario.summary}"
    last_shown = ""
    for verdict in played.verdicts:
        check = verdict.check
        word = _WORDS[verdict.outcome]
        yield f"  {word}  {check.name:{_NAME_WIDTH}}  {check.claim} ({check.rule})"
        if verdict.outcome is not Outcome.PASSED and verdict.evidence != last_shown:
            last_shown = verdict.evidence
            yield f"        {last_shown}"
    if not played.holds and played.said:
        yield "  the end of the client's output:"
        yield from (f"    | {line}" for line in played.said.splitlines())


def client_summary(all_played: Sequence[PlayedScenario], seconds: float) -> str:
    """How many checks passed, failed or were skipped."""
    counts = Counter(verdict.outcome for verdict in _findings(all_played))
    parts = [f"{counts[Outcome.PASSED]} passed", f"{counts[Outcome.FAILED]} failed"]
    if counts[Outcome.UNREACHED]:
        parts.append(f"{counts[Outcome.UNREACHED]} left open by an earlier failure")
    if counts[Outcome.SKIPPED]:
        parts.append(f"{counts[Outcome.SKIPPED]} skipped")
    return f"{', '.join(parts)}, in {seconds:.1f} s"


def client_json(all_played: Sequence[PlayedScenario], seconds: float) -> str:
    """All findings as JSON: `passed`, `seconds`, and each check with its outcome and evidence."""
    report: dict[str, Any] = {
        "passed": all(played.holds for played in all_played),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "name": verdict.check.name,
                "claim": verdict.check.claim,
                "rule": verdict.check.rule,
                "outcome": verdict.outcome.value,
                "evidence": verdict.evidence,
            }
            for verdict in _findings(all_played)
        ],
    }
    return json.dumps(report, indent=2)


def _findings(all_played: Sequence[PlayedScenario]) -> Iterator[Verdict]:
    for played in all_played:
        yield from played.verdicts
