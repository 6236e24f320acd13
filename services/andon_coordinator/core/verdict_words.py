"""Verdicts in words: where results differ and by whom, for people; and what the journal keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.attestations import ElementApart
from andon.protocol.halts import shown
from andon.protocol.layout import Layout
from andon.protocol.limits import clipped
from andon_coordinator.core.defects import ModelPlace, place_of
from andon_coordinator.core.effects import SaveVerdict
from andon_coordinator.core.given import Given
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.verdicts import Judgement

__all__ = ["names_of", "place_at", "sides_of", "verdict_of", "where"]


def place_at(layout: Layout | None, element: ElementApart) -> ModelPlace:
    """The place of an element; of one that the layout does not have nothing is known."""
    place = place_of(layout, element.block, element.element)
    return place if place.parameter else ModelPlace()


def where(layout: Layout | None, found: Judgement) -> tuple[ModelPlace, str]:
    """Where results differ first, and that as a part of a sentence, with both values if known."""
    if found.seen is not None and (place := place_at(layout, found.seen.element)).parameter:
        seen = found.seen
        of = "" if seen.node == found.node else f" in the sum of {seen.node}"
        one, other = map(shown, seen.values)
        ones, others = map(names_of, seen.workers)
        return place, f", first in {place}{of}: {one} by {ones}, and {other} by {others}"
    names = [
        ModelPlace(index, each.name)
        for index, block in enumerate(layout.blocks if layout else ())
        for each in block.components
    ]
    component = found.apart
    place = ModelPlace() if component is None or component >= len(names) else names[component]
    return place, f", first in {place}" if place.parameter else ""


def sides_of(found: Judgement) -> str:
    """Who stands against whom; a worker may have given several results."""
    wavering = {w for side in found.sides for w in side if sum(w in s for s in found.sides) > 1}
    firm = [tuple(w for w in side if w not in wavering) for side in found.sides]
    parts = [names_of(side) for side in firm if side]
    parts += [f"worker {worker}, which gave several," for worker in sorted(wavering)]
    return " against ".join(parts)


def verdict_of(
    round_: StepRound, convicted: Given | None, text: str, given: Mapping[int, Given]
) -> SaveVerdict:
    """A verdict with all digests that were given; those of an arithmetic under its number."""
    numbers: dict[Arithmetic, int] = {}
    evidence = [
        {
            "worker": each.worker,
            "incarnation": f"{each.incarnation:016x}",
            "arithmetic": numbers.setdefault(each.arithmetic, len(numbers)),
            "weights_from": each.source,
            "digests": {
                f"{node.first}+{len(node)}": [digest.hex() for digest in digests]
                for node, digests in sorted(each.digests.items())
            },
            "apart": [
                {
                    "node": f"{it.node.first}+{len(it.node)}",
                    "own": it.own.hex(),
                    "other": it.other.hex(),
                    "block": it.element.block,
                    "element": it.element.element,
                    "values": [shown(it.element.expected), shown(it.element.came)],
                }
                for it in each.apart
            ],
        }
        for each in given.values()
    ]
    return SaveVerdict(
        step=round_.terms.step,
        key=round_.key,
        worker=None if convicted is None else convicted.worker,
        text=clipped(text),
        evidence=json.dumps(evidence, separators=(",", ":")),
    )


def names_of(workers: Sequence[int]) -> str:
    """Some workers, as people read it: `workers 0, 1 and 2`."""
    if not workers:
        return "nobody"
    *others, last = map(str, workers)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
