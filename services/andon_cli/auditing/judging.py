"""Judging: what a script found when it recomputed steps, beside what the journal has of them.

Without I/O: the report's lines go in one after another, and the first difference comes out. A loss
is computed from the weights before its step, so one that differs may be an earlier step's fault:
`since` says after which step weights were last known to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from andon.protocol.halts import indexed
from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon_cli.auditing.scope import AuditRefused
from andon_coordinator.core.agreement import first_apart
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.core.verdicts import first_component
from andon_coordinator.transport.audit_book import AttestedNode, AttestedStep, ComparedWeights
from andon_coordinator.transport.reader import JournalEntry

__all__ = ["Difference", "Judge"]


_VERBS = {"weights": "are", "samples": "are", "averages": "are"}
_SHORT = 12
"""Digits of a digest that people see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which a recomputed step differs from the line's."""

    step: int
    what: str
    """`weights` or `averages`; `gradient` or `data` of grains; `loss`, `samples`, `weight`,
    `correct` or `overflow`; `evaluation`."""
    recorded: str
    """What the journal has."""
    recomputed: str
    since: int | None = None
    """The last step after which weights were compared and equal; None: none were."""
    workers: tuple[int, ...] = ()
    """Who attested what differs."""
    grains: str = ""
    """Of which grains."""
    parameter: str = ""
    """The first one that differs; empty: not known."""
    element: tuple[int, ...] = ()
    """The index of its first element that differs."""
    values: tuple[str, str] | None = None
    """There: in the run's checkpoint, and recomputed; None: the element is not known."""

    @property
    def in_words(self) -> str:
        """What differs, and what is known of where it arose."""
        if self.what == "evaluation":
            return (
                f"the evaluation after step {self.step} differs: the line has other sums for "
                f"{self.recorded}, and all losses until then are equal"
            )
        recorded, recomputed, first = self.recorded, self.recomputed, ""
        if self.grains or self.what in ("weights", "averages"):
            recorded, recomputed = recorded[:_SHORT], recomputed[:_SHORT]
        if self.grains:
            who = " and ".join(map(str, self.workers))
            of = f"the {self.what} of {self.grains}, by worker {who},"
        else:
            of = f"its {self.what}"
        if self.parameter:
            first = f", first in {indexed(self.parameter, self.element)}"
        if self.values is not None:
            there, here = self.values
            first += f" ({there} in the run's checkpoint, {here} recomputed)"
        return (
            f"step {self.step} differs: {of} {_VERBS.get(self.what, 'is')} {recorded} by the "
            f"journal, and {recomputed} recomputed{first}; {self._place}"
        )

    @property
    def _place(self) -> str:
        before = self.step - 1
        if self.since == before:
            return f"the weights before it, after step {before}, are equal"
        if self.since is None:
            return "no weights before it were compared, so an earlier step may be at fault"
        return (
            f"weights were last equal after step {self.since}, so any step from "
            f"{self.since + 1} on may be at fault"
        )

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
            "parameter": self.parameter,
            "element": list(self.element),
            "values": None if self.values is None else list(self.values),
        }


class Judge:
    """Compares what is recomputed with what the journal has, step by step."""

    def __init__(
        self,
        entries: Iterator[JournalEntry],
        weights: Mapping[int, ComparedWeights],
        attested: Callable[[Key], AttestedStep | None],
        layout: Layout | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Nothing was recomputed yet.

        Args:
            entries: the line's history after the record where the audit begins.
            weights: its weights after a step, by step, as far as they are known.
            attested: what workers attested of a step.
            layout: the parameters' names; None: not known.
            tolerance: of a run without equal bits, by which part of them losses and weights of
                steps may differ; None: they are equal to the bit.
        """
        self._tolerance = tolerance
        self.farthest: tuple[float, int] = 0.0, 0
        """By which part a loss has differed most, and in which step."""
        self._layout = layout
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
                return self._weights_after(said)
            case "evaluation":
                batches = ", ".join(str(each) for each in said["batches"][:8])
                return self._difference(
                    int(said["step"]), "evaluation", f"batches {batches}", "other sums"
                )
        return None

    def _weights_after(self, said: Mapping[str, Any]) -> Difference | None:
        step = int(said["step"])
        recorded = self._weights.get(step)
        if recorded is None or recorded.base_hashed not in (None, said["base_hashed"]):
            return None  # Two kinds of digest differ anyway.
        if recorded.sha256 != said["sha256"]:
            found = self._difference(step, "weights", recorded.sha256, said["sha256"])
            if (apart := said.get("apart")) is not None:
                return replace(
                    found,
                    parameter=apart["parameter"],
                    element=tuple(apart["element"]),
                    values=(apart["there"], apart["here"]),
                )
            prefixes = bytes.fromhex(said.get("prefixes", ""))
            return replace(
                found, parameter=first_apart(recorded.prefixes, prefixes, self._layout).parameter
            )
        self.weights_at = step
        return None

    def _step(self, said: Mapping[str, Any]) -> Difference | None:
        entry = next(self._steps, None)
        assert entry is not None
        step, result = entry.record.step, entry.result
        assert result is not None
        assert step == said["step"]
        # First what a step is made of, then what came of it, as narrowly as it is known.
        if self._tolerance is None:
            difference = (
                self._number(said, result, "samples", "weight", "overflow")
                or self._attested_in(entry.record.key, said)
                or self._number(said, result, "loss", "correct")
            )
        else:
            if said["left_behind"] and len(entry.record.roster) > 1:
                raise AuditRefused(_depends(step, said["left_behind"]))
            difference = self._number(said, result, "samples", "overflow") or self._near(
                said, result, "weight", "loss"
            )
        if difference is None:
            self.step = step
        return difference

    def _number(
        self, said: Mapping[str, Any], result: StepResult, *names: str
    ) -> Difference | None:
        for what in names:
            recorded, recomputed = getattr(result, what), said[what]
            if not _same(recorded, recomputed):
                return self._difference(said["step"], what, f"{recorded}", f"{recomputed}")
        return None

    def _near(self, said: Mapping[str, Any], result: StepResult, *names: str) -> Difference | None:
        for what in names:
            recorded, recomputed = getattr(result, what), said[what]
            if _same(recorded, recomputed):
                continue
            apart = abs(recorded - recomputed) / max(abs(recorded), abs(recomputed))
            assert self._tolerance is not None
            if not apart <= self._tolerance:
                return self._difference(said["step"], what, f"{recorded}", f"{recomputed}")
            if what == "loss":
                self.farthest = max(self.farthest, (apart, said["step"]))
        return None

    def _attested_in(self, key: Key, said: Mapping[str, Any]) -> Difference | None:
        """Compares the sums of a step's grains, and its averages, if workers attested any."""
        recomputed = {(first, grains): rest for first, grains, *rest in said["attested"]}
        attested = self._attested(key) if recomputed else None
        if attested is None:
            return None
        # Single grains come first: a sum that differs has one that does, or was added wrongly.
        for node in attested.nodes:
            gradient, data, components = recomputed.get((node.first, node.grains), ("", "", ""))
            for what, there, here in (
                ("data", node.samples, data),
                ("gradient", node.digest, gradient),
            ):
                if there and here and there != here:
                    alike = [each for each in attested.nodes if _is_alike(each, node)]
                    return Difference(
                        step=said["step"],
                        what=what,
                        recorded=there,
                        recomputed=here,
                        since=self.weights_at,
                        workers=tuple(sorted({each.worker for each in alike})),
                        grains=_named(node),
                        parameter=self._parameter(alike, components) if what == "gradient" else "",
                    )
            self.nodes += bool(gradient)
        if attested.averages and said["averages"] not in ("", attested.averages):
            return self._difference(said["step"], "averages", attested.averages, said["averages"])
        return None

    def _parameter(self, alike: Sequence[AttestedNode], recomputed: str) -> str:
        """The first component of a sum that differs, if somebody attested each of them."""
        theirs = next((each.components for each in alike if each.components), b"")
        at = first_component(theirs, bytes.fromhex(recomputed))
        blocks = () if self._layout is None else self._layout.blocks
        names = [each.name for block in blocks for each in block.components]
        return "" if at is None or at >= len(names) else names[at]

    def _difference(self, step: int, what: str, recorded: str, recomputed: str) -> Difference:
        return Difference(
            step=step, what=what, recorded=recorded, recomputed=recomputed, since=self.weights_at
        )


def _depends(step: int, left_behind: str) -> str:
    return (
        f"step {step} can't be compared: its loop body {left_behind}, and without same_bits what "
        "comes of that depends on which worker computes which samples. Train with `andon run "
        "--same-bits` (docs/guide/same-bits.md)"
    )


def _is_alike(one: AttestedNode, other: AttestedNode) -> bool:
    return (one.first, one.grains, one.digest) == (other.first, other.grains, other.digest)


def _named(node: AttestedNode) -> str:
    last = node.first + node.grains - 1
    return f"grain {last}" if node.grains == 1 else f"grains {node.first} to {last}"


def _same(one: float | None, other: float | None) -> bool:
    """Whether two numbers are equal; NaN is equal to NaN."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
