"""Checks: what a server must do, each with a name, and the result of trying it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from andon.host.errors import UsageError
from andon.protocol.records import Key

__all__ = [
    "Checks",
    "NotApplicable",
    "Result",
    "Scene",
    "ServerCheck",
    "Violation",
    "chosen",
    "require",
    "require_above",
    "same",
]

Outcome = Literal["pass", "fail", "skipped"]
Scene = Literal["bootstrap", "running", "restarting", "grains", "ending"]
"""When a check is made: during the bootstrap, on a line at rest, later with a server that the suite
kills, on a line in grains, or as the run ends."""
Play = Callable[[Any], Awaitable[None]]
"""Takes the `LineUnderTest`."""


class Violation(Exception):
    """The server broke the protocol: what was expected, and what came, as text for people."""

    def __init__(self, expected: str, came: str) -> None:
        """Both are sentences or values, as they stand in the report."""
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
    play: Play
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


class Checks(list[ServerCheck]):
    """The checks of one chapter, in the order in which they are made."""

    def add(
        self, name: str, rule: str, *, workers: int = 1, scene: Scene = "running"
    ) -> Callable[[Play], Play]:
        """Decorator of a function that plays a check. Its docstring is the check's claim."""

        def added(play: Play) -> Play:
            # Python -OO drops docstrings; the function's name is a sentence, too.
            claim = " ".join((play.__doc__ or play.__name__.replace("_", " ")).split())
            self.append(
                ServerCheck(
                    name=name,
                    rule=rule,
                    claim=claim.removesuffix("."),
                    play=play,
                    workers=workers,
                    scene=scene,
                )
            )
            return play

        return added


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


def _group(each: ServerCheck) -> str:
    return each.name.partition(".")[0]


def require(true: object, expected: str, came: object) -> None:
    """Demands that `true` is true.

    Raises:
        Violation: it is not.
    """
    if not true:
        raise Violation(expected, str(came))


def require_above(before: Key | None, key: Key, what: str = "a key") -> None:
    """Demands a key above an earlier one. As `require`."""
    require(before is not None and key > before, f"{what} above {before}", key)


def same(what: str, mine: Any, theirs: Any) -> None:
    """Demands that a value from the server equals the expected one. As `require`."""
    if mine != theirs:
        raise Violation(f"{what} {mine}", f"{theirs}")
