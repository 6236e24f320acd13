"""The report: what the judge found, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from andon_conformance.judge.checks import Finding, Outcome
from andon_conformance.judge.trial import Played

__all__ = ["report_json", "scenario_lines", "summary_line"]

_WORDS = {
    Outcome.PASSED: "pass",
    Outcome.FAILED: "FAIL",
    Outcome.SKIPPED: "skip",
    Outcome.UNREACHED: "OPEN",
}
_NAME_WIDTH = 24


def scenario_lines(played: Played) -> Iterator[str]:
    """A scenario, check by check; evidence, once, where checks did not pass."""
    yield f"{played.scenario.name}: {played.scenario.summary}"
    told = ""
    for finding in played.findings:
        check = finding.check
        word = _WORDS[finding.outcome]
        yield f"  {word}  {check.name:{_NAME_WIDTH}}  {check.claim} ({check.rule})"
        if finding.outcome is not Outcome.PASSED and finding.evidence != told:
            told = finding.evidence
            yield f"        {told}"
    if not played.holds and played.said:
        yield "  the client printed at last:"
        yield from (f"    | {line}" for line in played.said.splitlines())


def summary_line(all_played: Sequence[Played], seconds: float) -> str:
    """How many checks came to what."""
    counts = Counter(finding.outcome for finding in _findings(all_played))
    parts = [f"{counts[Outcome.PASSED]} passed", f"{counts[Outcome.FAILED]} failed"]
    if counts[Outcome.UNREACHED]:
        parts.append(f"{counts[Outcome.UNREACHED]} left open by an earlier failure")
    if counts[Outcome.SKIPPED]:
        parts.append(f"{counts[Outcome.SKIPPED]} skipped")
    return f"{', '.join(parts)}, in {seconds:.1f} s"


def report_json(all_played: Sequence[Played], seconds: float) -> str:
    """The same as JSON: `passed`, `seconds`, and each check with its outcome and evidence."""
    report: dict[str, Any] = {
        "passed": all(played.holds for played in all_played),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "name": finding.check.name,
                "claim": finding.check.claim,
                "rule": finding.check.rule,
                "outcome": finding.outcome.value,
                "evidence": finding.evidence,
            }
            for finding in _findings(all_played)
        ],
    }
    return json.dumps(report, indent=2)


def _findings(all_played: Sequence[Played]) -> Iterator[Finding]:
    for played in all_played:
        yield from played.findings
