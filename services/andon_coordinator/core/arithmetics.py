"""Arithmetics: what a line's workers state of their arithmetic, and who may not join.

docs/protocol-same-bits.md, section 36. It concerns lines whose plan has a grain, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic, ArithmeticRule, difference, remedy
from andon.protocol.reasons import Reason
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.core.join_answers import JoinRefusal

__all__ = ["Arithmetics", "refusal"]


@dataclass(slots=True)
class Arithmetics:
    """The line's arithmetic, and the last one of each worker that it ever had."""

    of_line: Arithmetic | None = None
    """That of the first worker that was accepted; None: there was none yet."""
    stated: dict[int, Arithmetic] = field(default_factory=dict)
    """By worker, what it stated when it last joined."""

    def note(self, worker: int, arithmetic: Arithmetic) -> bool:
        """Notes what an accepted worker states; whether that is news."""
        if self.of_line is None:
            self.of_line = arithmetic
        news = self.stated.get(worker) != arithmetic
        self.stated[worker] = arithmetic
        return news

    def difference(self, arithmetic: Arithmetic) -> tuple[str, str, str] | None:
        """The first name in which it differs from the line's, its value and the line's."""
        return difference(arithmetic, self.of_line or ())


def refusal(
    known: Arithmetics, request: JoinRequest, rule: ArithmeticRule, *, alone: bool
) -> JoinRefusal | None:
    """Why a worker may not join with its arithmetic; None: it may.

    Args:
        known: the line's.
        request: the worker's Join, whose plan has a grain.
        rule: what the operator wants.
        alone: whether no other worker is on the line.
    """
    if rule is ArithmeticRule.TELL or known.of_line is None:
        return None
    stated, of_line = request.arithmetic, known.of_line
    if not (stated and of_line):
        # Nobody knows whether what is not stated is the same.
        if stated == of_line and alone:
            return None
        who = "this worker does" if of_line else "the line's first worker did"
        text = (
            f"{who} not state its arithmetic: give all workers a client that does, or serve the "
            "line with --arithmetic tell"
        )
        mine, theirs = ("stated" if each else "unset" for each in (stated, of_line))
        return _refused("arithmetic", mine, theirs, text)
    found = known.difference(stated)
    if found is None:
        return None
    name, mine, theirs = found
    text = (
        f"this worker computes with {name} {mine}, and the line with {name} {theirs}: "
        f"{remedy(name, theirs)}, or serve the line with --arithmetic tell"
    )
    return _refused(name, mine, theirs, text)


def _refused(name: str, mine: str, theirs: str, text: str) -> JoinRefusal:
    return JoinRefusal(
        reason=Reason.ARITHMETIC_DIFFERS, message=text, component=name, mine=mine, theirs=theirs
    )
