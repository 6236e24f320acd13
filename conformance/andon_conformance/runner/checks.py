"""Checks: what a server must do, each with a name, and the result of trying it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from andon.host.errors import UsageError

__all__ = [
    "NotApplicable",
    "Result",
    "Scene",
    "ServerCheck",
    "Violation",
    "check",
    "chosen",
    "require",
    "same",
]

Outcome = Literal["pass", "fail", "skipped"]
Scene = Literal["bootstrap", "running", "restarting", "ending"]
"""When a check is made: during the bootstrap, on a line at rest, later with a server that the suite
kills, or as the run ends."""


class Violation(Exception):
    """The server broke the protocol: what was expected, and what came."""

    def __init__(self, expected: str, came: str) -> None:
        """Takes both as text for people."""
        super().__init__(f"expected {expected}; came {came}")
        self.expected = expected
        self.came = came


class NotApplicable(Exception):
    """The check does not apply: the server lacks something optional. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCheck:
    """One thing that a server must do. `play` raises `Violation` if it does not."""

    name: str
    """Stable: tests and scripts use it."""
    rule: str
    """Where docs/protocol.md says so: `19.7` is rule 7 in section 19, `5` is section 5."""
    claim: str
    """What the server must do, as a sentence."""
    play: Callable[[Any], Awaitable[None]]
    """Takes the `LineUnderTest` under test."""
    workers: int
    """The number of workers that the check needs."""
    scene: Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check."""

    name: str
    rule: str
    claim: str
    outcome: Outcome
    expected: str = ""
    came: str = ""
    """What came instead; for a skipped check, why it was skipped."""
    seconds: float = 0.0


def check(
    name: str, rule: str, claim: str, *, workers: int = 1, scene: Scene = "running"
) -> Callable[[Callable[[Any], Awaitable[None]]], ServerCheck]:
    """Decorator: makes a check of the function that plays it."""

    def made(play: Callable[[Any], Awaitable[None]]) -> ServerCheck:
        return ServerCheck(
            name=name, rule=rule, claim=claim, play=play, workers=workers, scene=scene
        )

    return made


def chosen(checks: Sequence[ServerCheck], names: Iterable[str]) -> list[ServerCheck]:
    """The checks with these names or in these groups (`average` is all `average.*`); no names: all.

    Raises:
        UsageError: there is no such check.
    """
    wanted = set(names)
    known = {each.name for each in checks} | {_group(each) for each in checks}
    unknown = sorted(wanted - known)
    if unknown:
        groups = ", ".join(sorted({_group(each) for each in checks}))
        raise UsageError(f"--only: there is no check {unknown[0]!r}; the groups are {groups}")
    return [each for each in checks if not wanted or wanted & {each.name, _group(each)}]


def require(true: object, expected: str, came: object) -> None:
    """Demands that `true` is true.

    Raises:
        Violation: it is not.
    """
    if not true:
        raise Violation(expected, str(came))


def same(what: str, mine: Any, theirs: Any) -> None:
    """Demands that a value from the server equals the expected one.

    Raises:
        Violation: it is not.
    """
    if mine != theirs:
        raise Violation(f"{what} {mine}", f"{theirs}")


def _group(each: ServerCheck) -> str:
    return each.name.partition(".")[0]
