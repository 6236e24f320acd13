"""Judging: what a script found when it recomputed steps, beside what the journal has of them.

Without I/O: the report's lines go in one after another, and the first difference comes out. A loss
is computed from the weights before its step, so one that differs may be an earlier step's fault:
`since` says after which step weights were last known to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from andon.protocol.records import Key
from andon_coordinator.core.effects import StepResult
from andon_coordinator.transport.audit_book import AttestedNode
from andon_coordinator.transport.reader import JournalEntry

__all__ = ["Difference", "Judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which a recomputed step differs from the line's."""

    step: int
    what: str
    """`weights`, `loss`, `samples`, `weight`, `correct`, `overflow`, `evaluation` or `grains`."""
    recorded: str
    """What the journal has."""
    recomputed: str
    since: int | None = None
    """The last step after which weights were compared and equal; None: none were."""
    workers: tuple[int, ...] = ()
    """Who attested what differs."""
    grains: str = ""
    """Of which grains."""

    @property
    def in_words(self) -> str:
        """What differs, and what is known of where it arose."""
        if self.what == "grains":
            who = " and ".join(map(str, self.workers))
            return (
                f"step {self.step} differs: worker {who} attested {self.recorded} for "
                f"{self.grains}, and recomputed it is {self.recomputed}"
            )
        if self.what == "evaluation":
            return (
                f"the evaluation after step {self.step} differs: the line has other sums for "
                f"{self.recorded}, and the losses of all steps until then are equal"
            )
        short = 12 if self.what == "weights" else None
        recorded, recomputed = self.recorded[:short], self.recomputed[:short]
        name = {"weights": "its weights are", "samples": "its samples are"}.get(
            self.what, f"its {self.what} is"
        )
        return (
            f"step {self.step} differs: {name} {recorded} by the journal, and {recomputed} "
            f"recomputed{self._place}"
        )

    @property
    def _place(self) -> str:
        before = self.step - 1
        if self.since == before:
            return f". Weights before it (after step {before}) are equal"
        known = "" if self.since is None else f"weights were last equal after step {self.since}, "
        if self.what == "weights":
            return f"; {known}and the losses of the steps before it are equal"
        return f"; {known}and no weights were compared since then: it may be an earlier step's"

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "step": self.step,
            "what": self.what,
            "recorded": self.recorded,
            "recomputed": self.recomputed,
            "weights_equal_after": self.since,
            "workers": list(self.workers),
            "grains": self.grains,
        }


class Judge:
    """Compares what is recomputed with what the journal has, step by step."""

    def __init__(
        self,
        entries: Iterator[JournalEntry],
        weights: Mapping[int, str],
        attested: Callable[[Key], Sequence[AttestedNode]],
    ) -> None:
        """Nothing was recomputed yet.

        Args:
            entries: the line's history after the record where the audit begins.
            weights: SHA-256 of its weights after a step, by step.
            attested: what workers attested of a step.
        """
        self._steps = (each for each in entries if each.result is not None)
        self._weights = weights
        self._attested = attested
        self.step: int | None = None
        """The last step whose numbers are equal."""
        self.weights_at: int | None = None
        """The last step after which weights are equal."""
        self.nodes = 0
        """Sums of grains that are what workers attested."""

    def take(self, said: Mapping[str, Any]) -> Difference | None:
        """Takes a line of the report; returns what it differs in, if it does."""
        match said.get("what"):
            case "step":
                return self._step(said)
            case "weights":
                return self._weights_after(int(said["step"]), str(said["sha256"]))
            case "evaluation":
                batches = ", ".join(str(each) for each in said["batches"][:8])
                return self._difference(
                    int(said["step"]), "evaluation", f"batches {batches}", "other sums"
                )
        return None

    def _weights_after(self, step: int, found: str) -> Difference | None:
        recorded = self._weights.get(step)
        if recorded is None:
            return None
        if recorded != found:
            return self._difference(step, "weights", recorded, found)
        self.weights_at = step
        return None

    def _step(self, said: Mapping[str, Any]) -> Difference | None:
        entry = next(self._steps)
        step, result = entry.record.step, entry.result
        assert result is not None
        assert step == said["step"]
        # First what a step is made of, then what came of it.
        for what, recorded in _numbers(result).items():
            if not _same(recorded, said[what]):
                return self._difference(step, what, f"{recorded}", f"{said[what]}")
        difference = self._grains(entry.record.key, step, said.get("attested", ()))
        if difference is None:
            self.step = step
        return difference

    def _grains(self, key: Key, step: int, found: Sequence[Sequence[Any]]) -> Difference | None:
        recomputed = {(first, grains): digest for first, grains, digest in found}
        if not recomputed:
            return None
        # Single grains first: a sum that differs has a grain that does, or was added wrongly.
        nodes = sorted(self._attested(key), key=lambda each: (each.grains, each.first))
        for node in nodes:
            mine = recomputed.get((node.first, node.grains))
            if mine is None:
                continue
            if mine != node.digest:
                wrong = [
                    each.worker
                    for each in nodes
                    if (each.first, each.grains, each.digest)
                    == (node.first, node.grains, node.digest)
                ]
                last = node.first + node.grains - 1
                which = f"grain {last}" if node.grains == 1 else f"grains {node.first} to {last}"
                return Difference(
                    step=step,
                    what="grains",
                    recorded=node.digest,
                    recomputed=mine,
                    since=self.weights_at,
                    workers=tuple(wrong),
                    grains=which,
                )
            self.nodes += 1
        return None

    def _difference(self, step: int, what: str, recorded: str, recomputed: str) -> Difference:
        return Difference(
            step=step, what=what, recorded=recorded, recomputed=recomputed, since=self.weights_at
        )


def _numbers(result: StepResult) -> dict[str, float | int | bool | None]:
    return {
        "samples": result.samples,
        "weight": result.weight,
        "overflow": result.overflow,
        "loss": result.loss,
        "correct": result.correct,
    }


def _same(one: float | None, other: float | None) -> bool:
    """Whether two numbers are equal; NaN is equal to NaN."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
