"""Findings: the results of the doctor's checks, each problem with its remedy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Finding", "fail", "findings_json", "healthy", "ok", "warn"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `warn` is worth knowing, `fail` keeps a run from working."""

    check: str
    level: Literal["ok", "warn", "fail"]
    fact: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Refuses a problem without a remedy."""
        if self.level != "ok" and not self.remedy:
            raise ValueError(f"a problem needs a remedy: {self.fact}")

    def __str__(self) -> str:
        """One line, such as `warn  no CUDA device: workers run on the CPU`."""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{self.level:<4}  {self.fact}{remedy}"


def ok(check: str, fact: str) -> Finding:
    """A check that passed."""
    return Finding(check, "ok", fact)


def warn(check: str, fact: str, remedy: str) -> Finding:
    """A problem that a run can do without fixing."""
    return Finding(check, "warn", fact, remedy)


def fail(check: str, fact: str, remedy: str) -> Finding:
    """A problem that keeps a run from working."""
    return Finding(check, "fail", fact, remedy)


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.level != "fail" for finding in findings)


def findings_json(findings: Sequence[Finding]) -> str:
    """All findings as one line of JSON."""
    return json.dumps(
        {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}
    )
