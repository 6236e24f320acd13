"""Checking means: what is wrong with averages, where nobody disputes the sums they were made of.

`mean_verdicts` judges reducers; here its verdict becomes a defect that names the reducer and the
element. Where the right averages came, a worker may still have changed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from andon.protocol.attestations import ElementApart, NodeOwner
from andon.protocol.grains import Node
from andon.protocol.halts import HaltReason, indexed, shown
from andon.protocol.limits import clipped
from andon_coordinator.core import verdicts
from andon_coordinator.core.defects import LineDefect, ModelPlace
from andon_coordinator.core.given import Given, Seen
from andon_coordinator.core.mean_verdicts import judge_means
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.verdict_words import names_of, place_at, where
from andon_coordinator.core.verdicts import Judgement

__all__ = [
    "Holders",
    "holders_of",
    "in_averages",
    "in_means",
    "in_writing",
    "told_of_writing",
]


def in_means(core: CoreState, round_: StepRound) -> LineDefect | None:
    """What is wrong with the mean that the reducers made."""
    assert round_.checks is not None
    sums = round_.checks.sums
    if not sums:
        return None
    checks = {
        worker: report.mean_check
        for worker, report in round_.in_rank_order
        if report.mean_check is not None
    }
    found = judge_means(checks, sums, _sent(round_, sums))
    if found is None:
        return None
    place = ModelPlace() if found.apart is None else place_at(core.layout, found.apart)
    step, who = round_.terms.step, names_of(found.witnesses)
    if found.apart is None:
        message = f"{who} can't verify the averages of step {step}: {found.why}"
    else:
        first = f"first in {indexed(place.parameter, place.element) or 'an unknown element'}"
        what = (
            f"the averages of step {step} are not the mean of the sums that workers sent, {first}: "
            f"{shown(found.apart.came)} came, and {who} made {shown(found.apart.expected)}"
        )
        at = _reducer(core, round_, found.apart)
        message = (
            f"{at} added wrong: {what}"
            if found.convicts
            else f"{what}; {found.why}, so nobody knows whether {at} is at fault"
        )
    return LineDefect(
        reason=HaltReason.WRONG_ARITHMETIC,
        message=clipped(message),
        place=place,
        value="" if found.apart is None else shown(found.apart.came),
    )


Holders = tuple[tuple[int, ...], ...]
"""The workers of each digest of the averages."""


def holders_of(round_: StepRound) -> Holders:
    """Who holds which averages; empty if all hold the same."""
    return verdicts.different_averages(
        {worker: report.averages_digest for worker, report in round_.in_rank_order}
    )


def in_writing(round_: StepRound, given: Mapping[int, Given], holders: Holders) -> Judgement | None:
    """Who did not write the averages as they came; None: nobody, or nobody can say who.

    All have said that the right ones came. Whoever holds others than two that agree has changed
    them, unless two of those agree as well.
    """
    assert round_.checks is not None
    assert round_.grains is not None
    if not round_.checks.sums or not holders or len(holders[0]) < 2:
        return None
    if any(len(each) > 1 for each in holders[1:]):
        return None
    differ = {worker for each in holders[1:] for worker in each}
    return Judgement(
        node=round_.grains.root,
        convicted=tuple(each for each in given.values() if each.worker in differ),
        witnesses=holders[0],
        seen=_seen(round_, holders),
    )


def _seen(round_: StepRound, holders: Holders) -> Seen | None:
    """The first element of the averages in which a worker has not what came, if one says so."""
    held = {worker: report.averages_digest for worker, report in round_.in_rank_order}
    for worker in (worker for each in reversed(holders) for worker in each):
        for each in round_.ready[worker].apart:
            if each.own == held[worker]:
                right = tuple(it for it, digest in held.items() if digest == each.other)
                values = each.element.expected, each.element.came
                return Seen(
                    node=each.node, element=each.element, values=values, workers=((worker,), right)
                )
    return None


def told_of_writing(core: CoreState, round_: StepRound, found: Judgement) -> str:
    """The same, as people read it."""
    who, others = names_of([each.worker for each in found.convicted]), names_of(found.witnesses)
    return (
        f"{who} changed the averages of step {round_.terms.step}: the right ones came, and what "
        f"its optimizer would read is not what {others} have{where(core.layout, found)[1]}"
    )


def in_averages(core: CoreState, round_: StepRound, holders: Holders) -> LineDefect | None:
    """Averages of which workers hold different ones, and nobody can say why."""
    if not holders:
        return None
    seen = _seen(round_, holders)
    place, first = ModelPlace(), ""
    if seen is not None:
        place = place_at(core.layout, seen.element)
        one, other = map(shown, seen.values)
        first = f" (first in {place}: {one} with {names_of(seen.workers[0])}, and {other} came)"
    others = " and ".join(map(names_of, holders[1:]))
    return LineDefect(
        reason=HaltReason.WRONG_ARITHMETIC,
        message=f"the averages of step {round_.terms.step} that {others} got are not those of "
        f"{names_of(holders[0])}{first}: a reducer, a network card or a memory is at fault, and "
        "nobody can say which",
        place=place,
        value="" if seen is None else shown(seen.values[0]),
    )


def _sent(round_: StepRound, sums: Sequence[NodeOwner]) -> dict[Node, bytes]:
    """The digest of each node as its owner contributed it."""
    reports = [report for _, report in round_.in_rank_order]
    return {
        # Of a grain that its owner verifies as well, the one that was contributed is first.
        each.node: next(it.digest for it in reports[each.rank].attested if it.node == each.node)
        for each in sums
    }


def _reducer(core: CoreState, round_: StepRound, apart: ElementApart) -> str:
    """The reducer that averaged an element in a round, as people know it."""
    blocks = core.layout.blocks[: apart.block] if core.layout else ()
    at = sum(block.elements for block in blocks) + apart.element
    address = next((it.address for it in round_.terms.reducers if it.start <= at < it.stop), "")
    return f"the reducer at {address}" if address else "the service's own reducer"
