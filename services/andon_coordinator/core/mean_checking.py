"""Checking means: what a line does about a mean that is not that of the sums that workers sent.

`mean_verdicts` judges; here its verdict becomes a defect with the reducer and the element by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from andon.protocol.attestations import ElementApart, NodeOwner
from andon.protocol.grains import Node
from andon.protocol.halts import HaltReason
from andon.protocol.limits import clipped
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.mean_verdicts import judge_means
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["in_means", "names_of"]


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
    place = _element(core, found.apart)
    step, who = round_.terms.step, names_of(found.witnesses)
    if found.apart is None:
        message = f"{who} can't verify the averages of step {step}: {found.why}"
    else:
        first = f"first in {place.name}" if place.name else "first in an unknown element"
        what = (
            f"the averages of step {step} are not the mean of the sums that workers sent, {first}: "
            f"{found.apart.came:g} came, and {who} made {found.apart.expected:g}"
        )
        at = _reducer(core, found.apart)
        message = (
            f"{at} added wrong: {what}"
            if found.convicts
            else f"{what}; {found.why}, so nobody knows whether {at} is at fault"
        )
    return LineDefect(
        reason=HaltReason.WRONG_ARITHMETIC,
        message=clipped(message),
        block=place.block,
        parameter=place.parameter,
        element=place.element,
        value="" if found.apart is None else f"{found.apart.came:g}",
    )


def _sent(round_: StepRound, sums: Sequence[NodeOwner]) -> dict[Node, bytes]:
    """The digest of each node as its owner contributed it."""
    reports = [report for _, report in round_.in_rank_order]
    return {
        # Of a grain that its owner verifies as well, the one that was contributed is first.
        each.node: next(it.digest for it in reports[each.rank].attested if it.node == each.node)
        for each in sums
    }


def _reducer(core: CoreState, apart: ElementApart) -> str:
    """The reducer that averages an element, as people know it."""
    blocks = core.layout.blocks[: apart.block] if core.layout else ()
    at = sum(block.elements for block in blocks) + apart.element
    address = next((it.address for it in core.reducer_map if it.start <= at < it.stop), "")
    return f"the reducer at {address}" if address else "the service's own reducer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    """Where two values differ, as far as the layout says."""

    block: int | None = None
    parameter: str = ""
    element: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As people read it: `blocks.3.weight[17, 204]`."""
        index = f"[{', '.join(map(str, self.element))}]" if self.element else ""
        return f"{self.parameter}{index}"


def _element(core: CoreState, apart: ElementApart | None) -> _Element:
    if apart is None or core.layout is None:
        return _Element()
    try:
        place = core.layout.place(apart.block, apart.element)
    except IndexError:  # A worker's mistake.
        return _Element()
    return _Element(block=apart.block, parameter=place.parameter, element=place.element)


def names_of(workers: Sequence[int]) -> str:
    """Some workers, as people read it: `workers 0, 1 and 2`."""
    if not workers:
        return "nobody"
    *others, last = map(str, workers)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
