"""Checking means: what is wrong with averages, where nobody disputes the sums they were made of.

`mean_verdicts` judges reducers; here its verdict becomes a defect that names the reducer and the
element. Where the right averages came, a worker may still have changed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from andon.protocol.attestations import ElementApart, NodeOwner
from andon.protocol.grains import Node
from andon.protocol.halts import HaltReason, indexed
from andon.protocol.limits import clipped
from andon_coordinator.core import verdicts
from andon_coordinator.core.defects import LineDefect, place_of
from andon_coordinator.core.mean_verdicts import judge_means
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.verdicts import Given, Judgement

__all__ = [
    "Holders",
    "holders_of",
    "in_averages",
    "in_means",
    "in_writing",
    "names_of",
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
    block, parameter, element = _place(core, found.apart)
    step, who = round_.terms.step, names_of(found.witnesses)
    if found.apart is None:
        message = f"{who} can't verify the averages of step {step}: {found.why}"
    else:
        first = (
            f"first in {indexed(parameter, element)}"
            if parameter
            else "first in an unknown element"
        )
        what = (
            f"the averages of step {step} are not the mean of the sums that workers sent, {first}: "
            f"{found.apart.came:g} came, and {who} made {found.apart.expected:g}"
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
        block=block,
        parameter=parameter,
        element=element,
        value="" if found.apart is None else f"{found.apart.came:g}",
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
    )


def told_of_writing(round_: StepRound, found: Judgement) -> str:
    """The same, as people read it."""
    who, others = names_of([each.worker for each in found.convicted]), names_of(found.witnesses)
    return (
        f"{who} changed the averages of step {round_.terms.step}: the right ones came, and what "
        f"its optimizer would read is not what {others} have"
    )


def in_averages(round_: StepRound, holders: Holders) -> LineDefect | None:
    """Averages of which workers hold different ones, and nobody can say why."""
    if not holders:
        return None
    others = " and ".join(map(names_of, holders[1:]))
    return LineDefect(
        reason=HaltReason.WRONG_ARITHMETIC,
        message=f"the averages of step {round_.terms.step} that {others} got are not those of "
        f"{names_of(holders[0])}: a reducer, a network card or a memory is at fault, and nobody "
        "can say which",
    )


def _sent(round_: StepRound, sums: Sequence[NodeOwner]) -> dict[Node, bytes]:
    """The digest of each node as its owner contributed it."""
    reports = [report for _, report in round_.in_rank_order]
    return {
        # Of a grain that its owner verifies as well, the one that was contributed is first.
        each.node: next(it.digest for it in reports[each.rank].attested if it.node == each.node)
        for each in sums
    }


def _place(core: CoreState, apart: ElementApart | None) -> tuple[int | None, str, tuple[int, ...]]:
    """The block, the parameter and the index of an element; nothing of it if it is no element."""
    if apart is None:
        return None, "", ()
    parameter, element = place_of(core.layout, apart.block, apart.element)
    return (apart.block if parameter else None), parameter, element


def _reducer(core: CoreState, round_: StepRound, apart: ElementApart) -> str:
    """The reducer that averaged an element in a round, as people know it."""
    blocks = core.layout.blocks[: apart.block] if core.layout else ()
    at = sum(block.elements for block in blocks) + apart.element
    address = next((it.address for it in round_.terms.reducers if it.start <= at < it.stop), "")
    return f"the reducer at {address}" if address else "the service's own reducer"


def names_of(workers: Sequence[int]) -> str:
    """Some workers, as people read it: `workers 0, 1 and 2`."""
    if not workers:
        return "nobody"
    *others, last = map(str, workers)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
