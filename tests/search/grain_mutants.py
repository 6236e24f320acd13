"""Mutants of grains: rules of the tree taken out, wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from andon.protocol.attestations import MeanCheck
from andon.protocol.grains import Grains
from andon.protocol.messages import BlockGradient
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges
from andon_coordinator.core import mean_checking, steps, verdicts, verifying
from andon_coordinator.core import round as round_module
from andon_coordinator.core.mean_verdicts import MeanJudgement
from andon_coordinator.core.verdicts import Inquest, Judgement
from andon_reducer.core.exchange import IncompleteChunk, place_of
from andon_reducer.core.nodes import ExchangeNodes
from andon_reducer.core.run import Run
from andon_reducer.core.stream import StreamState
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from search.mutants import Mutant, Patch, Right, mutants_of, wrap
from search.state import RELAYED, WRONG_ARITHMETIC, Bounds
from search.worker import Worker

__all__ = ["GRAIN_MUTANTS"]

GRAIN_MUTANTS: list[Mutant] = []

_mutant = mutants_of(GRAIN_MUTANTS)


def _world(*kinds: str) -> Bounds:
    return Bounds(faults=1, steps=1, grains=True, kinds=frozenset(kinds))


@_mutant(_world("data"), "were due")
def _a_node_counted_twice(patch: Patch) -> None:
    """Sections 31 and 33: a lost round's grains are dealt to all, and nobody looks at overlaps."""

    def deal(
        right: Right, grains: Grains, kept: Sequence[Iterable[PositionRange]], *split: Any
    ) -> tuple[Ranges, ...]:
        owned = [tuple(each) for each in kept]
        if not any(owned):
            again: tuple[Ranges, ...] = right(grains, kept, *split)
            return again
        return ((PositionRange(0, grains.count),), *owned[1:])

    def complete(chunk: IncompleteChunk) -> bool:
        exchange = chunk.exchange
        return len(chunk.streams) + len(exchange.abstained) == exchange.ranks.world_size

    wrap(patch, Grains, "deal", deal)
    wrap(patch, ExchangeNodes, "admit", _admitted)
    patch.setattr(IncompleteChunk, "complete", property(complete))
    patch.setattr(round_module, "along_tree", lambda losses, grains, number: float(grains.count))
    patch.setattr(steps, "in_round", lambda *round_: None)


def _admitted(_: Right, nodes: ExchangeNodes, rank: int, *sent: object) -> bool:
    nodes.ranks.add(rank)
    return False


@_mutant(_world("break"), "of other weights")
def _siblings_of_two_rounds_joined(patch: Patch) -> None:
    """Rule 14: a node of an older round is taken for one of the present, and a second is left."""

    def contribute(
        right: Right, run: Run, stream: StreamState, gradient: BlockGradient, now: float
    ) -> Any:
        round_ = run._round
        if round_ is not None and gradient.key < round_.key:
            gradient = replace(gradient, key=round_.key)
        elif stream.last is not None and (gradient.key, place_of(gradient)) <= stream.last:
            return []
        return right(run, stream, gradient, now)

    wrap(patch, Run, "contribute", contribute)
    patch.setattr(StreamState, "_out_of_order", lambda *_: None)


@_mutant(replace(_world(), faults=0, steps=2), "of other weights")
def _sums_of_an_older_head(patch: Patch) -> None:
    """Section 31: what was summed of a grain of an earlier batch is taken for the present one's."""

    def serves(kept: Kept, assigned: Assigned, doubts: int) -> bool:
        return sum(map(len, kept.positions)) <= sum(map(len, assigned.positions))

    patch.setattr(Kept, "serves", serves)
    patch.setattr(Worker, "_forget_sums", lambda worker: None)


_VERIFIED = replace(_world(WRONG_ARITHMETIC), verifies=True)


@_mutant(_VERIFIED, "differs in", verifying, "settles")
def _a_difference_is_committed(_: Right, *__: object) -> bool:
    """Section 37: a round becomes a record though two workers differ in a grain."""
    return False


@_mutant(_VERIFIED, "and was right", verdicts, "judge")
def _one_witness_convicts(right: Right, inquest: Inquest) -> Judgement:
    """Section 37: who reported first is believed, so its own result counts as another's."""
    found: Judgement = right(inquest)
    node, (first, *others) = found.node, inquest.given.values()
    wrong = [each for each in others if each.digests.get(node) != first.digests.get(node)]
    return replace(found, convicted=tuple(wrong))


_RELAYED = replace(_world(RELAYED), workers=3, verifies=True)


@_mutant(_RELAYED, "did not get all sums", mean_checking, "judge_means")
def _sums_that_came_changed_are_committed(right: Right, *given: Any) -> MeanJudgement | None:
    """Section 37, rule 10: where no mean differs, nobody looks at what was relayed."""
    found: MeanJudgement | None = right(*given)
    return None if found is None or found.apart is None else found


@_mutant(_RELAYED, "a reducer is convicted", mean_checking, "judge_means")
def _a_mean_of_sums_that_came_changed_convicts(
    right: Right, checks: Mapping[int, MeanCheck], *given: Any
) -> MeanJudgement | None:
    """Section 37, rule 10: workers that made one mean are believed, whatever they made it of."""
    found: MeanJudgement | None = right(checks, *given)
    made = {each.expected for each in checks.values() if each.apart is not None}
    return found if found is None or len(made) != 1 else replace(found, convicts=True)
