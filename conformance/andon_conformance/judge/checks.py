"""Checks: what a client must do, and the verdict on each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Check", "Outcome", "Overdue", "Stopped", "Verdict", "Verdicts", "is_wanted"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a client must do."""

    name: str
    """Stable: the scenario's name, a dot, and the check's own name."""
    claim: str
    """What a conforming client does, as the predicate of a sentence."""
    rule: str
    """Where docs/protocol.md demands it: `rule 7`, or `section 4`."""


class Outcome(enum.Enum):
    """The result of a check."""

    PASSED = "pass"
    FAILED = "fail"
    SKIPPED = "skipped"
    """It does not apply to this client."""
    UNREACHED = "unreached"
    """The scenario ended before it could be decided."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's outcome, with the evidence."""

    check: Check
    outcome: Outcome
    evidence: str
    """What the judge saw."""


class Overdue(Exception):
    """An awaited event did not come: a sentence that says what came instead."""


class Stopped(Exception):
    """The scenario can't go on; the verdict that ended it says why."""


class Verdicts:
    """The verdicts of one scenario so far. A failed check stays failed."""

    def __init__(self, checks: Sequence[Check]) -> None:
        """Will decide `checks`."""
        self._checks: Mapping[str, Check] = {check.name: check for check in checks}
        self._found: dict[str, Verdict] = {}

    def judge(self, name: str, fact: object, evidence: str) -> bool:
        """Passes the check if `fact` is true, else fails it; returns whether it passed.

        `evidence` says what the judge saw, in either case.
        """
        held = bool(fact)
        (self.passed if held else self.failed)(name, evidence)
        return held

    def passed(self, name: str, evidence: str) -> None:
        """Passes a check, unless it failed before."""
        self._find(name, Outcome.PASSED, evidence)

    def failed(self, name: str, evidence: str) -> None:
        """Fails a check."""
        self._find(name, Outcome.FAILED, evidence)

    def skip(self, name: str, why: str) -> None:
        """Skips a check that does not apply to this client."""
        self._find(name, Outcome.SKIPPED, why)

    @contextmanager
    def deciding(self, name: str) -> Iterator[None]:
        """Within this context `Overdue` fails check `name` and ends the scenario.

        Raises:
            Stopped: in place of `Overdue`.
        """
        try:
            yield
        except Overdue as overdue:
            self._find(name, Outcome.FAILED, str(overdue))
            raise Stopped(f"{name} ended the scenario") from overdue

    def holds(self, name: str) -> bool:
        """Whether a check has passed."""
        found = self._found.get(name)
        return found is not None and found.outcome is Outcome.PASSED

    def all(self, ended: str) -> list[Verdict]:
        """A verdict for every check; `ended` is the evidence for those that were not reached."""
        return [
            self._found.get(name, Verdict(check, Outcome.UNREACHED, ended))
            for name, check in self._checks.items()
        ]

    def _find(self, name: str, outcome: Outcome, evidence: str) -> None:
        check = self._checks[name]
        before = self._found.get(name)
        if before is None or (before.outcome is Outcome.PASSED and outcome is Outcome.FAILED):
            self._found[name] = Verdict(check, outcome, evidence)


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether `only` has the check's name or its scenario's; an empty `only` has all."""
    return not only or name in only or name.partition(".")[0] in only
