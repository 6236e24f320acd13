"""The judge's report, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from andon_conformance.judge.checks import Outcome, Verdict
from andon_conformance.judge.trial import PlayedScenario

__all__ = ["report_json", "scenario_lines", "summary_line"]

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


def summary_line(all_played: Sequence[PlayedScenario], seconds: float) -> str:
    """How many checks passed, failed or were skipped."""
    counts = Counter(verdict.outcome for verdict in _findings(all_played))
    parts = [f"{counts[Outcome.PASSED]} passed", f"{counts[Outcome.FAILED]} failed"]
    if counts[Outcome.UNREACHED]:
        parts.append(f"{counts[Outcome.UNREACHED]} left open by an earlier failure")
    if counts[Outcome.SKIPPED]:
        parts.append(f"{counts[Outcome.SKIPPED]} skipped")
    return f"{', '.join(parts)}, in {seconds:.1f} s"


def report_json(all_played: Sequence[PlayedScenario], seconds: float) -> str:
    """The same as JSON: `passed`, `seconds`, and each check with its outcome and evidence."""
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
