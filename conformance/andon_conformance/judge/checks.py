"""Checks: what a client must do, and the verdict on each."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Check",
    "Outcome",
    "Overdue",
    "Stopped",
    "Verdict",
    "Verdicts",
    "checks_of",
    "is_wanted",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a client must do."""

    name: str
    """Stable: the scenario's name, a dot, and the check's own name."""
    claim: str
    """What a conforming client does, as the predicate of a sentence."""
    rule: str
    """Where docs/protocol.md demands it: `rule 7`, or `section 4`."""


def checks_of(table: str) -> tuple[Check, ...]:
    """The checks of a table: each line has a name, a rule of two words, and the claim.

    An indented line goes on with the claim of the line before it.
    """
    rows: list[list[str]] = []
    for line in textwrap.dedent(table).strip().splitlines():
        if line.startswith(" "):
            rows[-1] += line.split()
        else:
            rows.append(line.split())
    return tuple(Check(name, " ".join(claim), f"{of} {at}") for name, of, at, *claim in rows)


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
        """Passes the check if `fact` is true, else fails it; returns whether it is true."""
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

    def skip_undecided(self, why: str) -> None:
        """Skips every check without a verdict so far."""
        for name in self._checks.keys() - self._found.keys():
            self.skip(name, why)

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

    async def must(self, name: str, what: Awaitable[_T]) -> _T:
        """What is awaited. As `deciding`, if it does not come in time."""
        with self.deciding(name):
            return await what

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
        # A failed check stays failed: a later pass may be about another part of the claim.
        if before is None or (before.outcome is Outcome.PASSED and outcome is Outcome.FAILED):
            self._found[name] = Verdict(check, outcome, evidence)


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether `only` has the check's name or its scenario's; an empty `only` has all."""
    return not only or name in only or name.partition(".")[0] in only
