"""Checks: what a client must do, and what was found of it."""

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
    """Stable: the scenario's name, a point, and what is checked."""
    claim: str
    """What a client that passes does, as a sentence's predicate."""
    rule: str
    """Where docs/protocol.md says so: `rule 7`, or `section 4`."""


class Outcome(enum.Enum):
    """What became of a check."""

    PASSED = "pass"
    FAILED = "fail"
    SKIPPED = "skipped"
    """It does not concern this client."""
    UNREACHED = "unreached"
    """The scenario ended before it could be decided."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's outcome."""

    check: Check
    outcome: Outcome
    evidence: str
    """What was seen."""


class Overdue(Exception):
    """What a script waited for did not come: a sentence of what came instead."""


class Stopped(Exception):
    """The scenario can't go on; why is said by the finding that ended it."""


class Verdicts:
    """What one scenario found so far. A check that failed once stays failed."""

    def __init__(self, checks: Sequence[Check]) -> None:
        """Is to decide `checks`."""
        self._checks: Mapping[str, Check] = {check.name: check for check in checks}
        self._found: dict[str, Verdict] = {}

    def judge(self, name: str, fact: object, evidence: str) -> bool:
        """Passes or fails a check by `fact`; whether it holds.

        `evidence` says what was seen, whichever way.
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
        """Says that a check does not concern this client."""
        self._find(name, Outcome.SKIPPED, why)

    @contextmanager
    def deciding(self, name: str) -> Iterator[None]:
        """What comes too late in here fails check `name`, and ends the scenario.

        Raises:
            Stopped: that happened.
        """
        try:
            yield
        except Overdue as overdue:
            self._find(name, Outcome.FAILED, str(overdue))
            raise Stopped(f"{name} ended the scenario") from overdue

    def holds(self, name: str) -> bool:
        """Whether a check was decided, and passed."""
        found = self._found.get(name)
        return found is not None and found.outcome is Outcome.PASSED

    def all(self, ended: str) -> list[Verdict]:
        """A finding for every check; `ended` says why those that are left were not reached."""
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
    """Whether a check is one of `only`: its own name, or that of its scenario. None: all are."""
    return not only or name in only or name.partition(".")[0] in only
