"""Defects of a worker that computes grains, and verifies others' grains.

Each names the check of the judge that must find it.

They are for `judged_line.py`, whose loop has grains if the judge asks for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from andon.protocol.capabilities import SAME_BITS
from andon.protocol.grains import Node, cover
from andon.v1 import coordinator_pb2 as pb
from andon_trainer.averaging import node_sums
from andon_trainer.averaging.attesting import SumHashes
from andon_trainer.averaging.grain_averaging import LineGrains
from andon_trainer.averaging.mean_checks import MeanChecks
from andon_trainer.averaging.node_sums import NodeSums, Parts
from andon_trainer.averaging.verification import Verification
from andon_trainer.exchange.collector import OpenCall
from andon_trainer.exchange.control import control
from andon_trainer.exchange.route import Route
from andon_trainer.exchange.star import reducer_path
from andon_trainer.exchange.star.reducer_path import WireLane
from andon_trainer.place.membership import Membership
from andon_trainer.schedules import grain_losses
from conformance.breaking import put, wrap
from conformance.judged_defects import Defect

__all__ = ["GRAIN_DEFECTS"]

GRAIN_DEFECTS: dict[str, Defect] = {}
"""The defects, by the argument of `judged_line.py`."""

_NEVER_S = 6.0

_Right = Callable[..., Any]


def _found_by(
    check: str, patience_s: float = Defect.patience_s
) -> Callable[[Callable[[], None]], None]:
    """Decorator: the function breaks a worker. The defect has its name, with hyphens."""

    def add(build: Callable[[], None]) -> None:
        name = build.__name__.replace("_", "-")
        GRAIN_DEFECTS[name] = Defect(check, build, patience_s=patience_s)

    return add


@_found_by("grains.plan")
def names_another_tree() -> None:
    def join_to(right: _Right, joining: Any) -> pb.Join:
        join: pb.Join = right(joining)
        join.plan.tree *= 2
        return join

    wrap(control, "join_to", join_to)


@_found_by("grains.opening")
def opens_without_the_capability() -> None:
    def opening(right: _Right, *arguments: Any) -> Any:
        told = right(*arguments)
        others = tuple(each for each in told.capabilities if each != SAME_BITS)
        return replace(told, capabilities=others)

    wrap(Route, "_opening", opening)


@_found_by("grains.nodes")
def adds_up_nothing() -> None:
    """Contributes each grain by itself."""

    def leaves(owned: Any, count: int) -> tuple[Node, ...]:
        nodes = cover(owned, count)
        return tuple(Node(at, at + 1) for node in nodes for at in range(node.first, node.stop))

    def keep(_: _Right, self: NodeSums, grain: int, leaf: Parts) -> None:
        self._sums[Node(grain, grain + 1)] = leaf

    put(grain_losses, "cover", leaves)
    wrap(NodeSums, "add", keep)


@_found_by("grains.order")
def sends_nodes_backwards() -> None:
    rising: Any = OpenCall.contributions

    def send(right: _Right, self: WireLane, block: int, flats: Sequence[Any], **more: Any) -> None:
        right(self, block, flats[::-1], **more)

    put(OpenCall, "contributions", property(lambda self: rising.fget(self)[::-1]))
    wrap(WireLane, "send", send)


@_found_by("grains.weight")
def changes_a_weight_on_the_way() -> None:
    def gradient(right: _Right, *arguments: Any) -> Any:
        message = right(*arguments)
        return replace(message, weight=message.weight + message.offset)

    wrap(reducer_path, "_gradient", gradient)


@_found_by("grains.losses")
def reports_nodes_backwards() -> None:
    def ready_to(right: _Right, report: Any) -> Any:
        return right(replace(report, node_losses=report.node_losses[::-1]))

    wrap(control, "ready_to", ready_to)


@_found_by("grains.tree")
def adds_with_a_wrong_rounding() -> None:
    def added(right: _Right, left: Parts, other: Parts) -> Parts:
        return [None if each is None else each.bfloat16().float() for each in right(left, other)]

    wrap(node_sums, "_added", added)


@_found_by("grains.kept")
def counts_what_it_kept_twice() -> None:
    def begin(right: _Right, self: LineGrains, grains: Any, *, kept: bool, **more: Any) -> None:
        right(self, grains, kept=kept, **more)
        if kept:
            with torch.no_grad():
                for parts in (
                    each for block in self._sums._blocks for each in block._sums.values()
                ):
                    torch._foreach_mul_([part for part in parts if part is not None], 2.0)

    wrap(LineGrains, "begin_grains", begin)


@_found_by("grains.abstain", patience_s=_NEVER_S)
def keeps_silent_without_grains() -> None:
    wrap(WireLane, "abstain", lambda right, self: None)


@_found_by("grains.part")
def takes_parts_of_grains() -> None:
    wrap(Membership, "_refuse_part_of_grain", lambda right, self, assigned: None)


@_found_by("grains.reducer")
def sends_nodes_to_any_reducer() -> None:
    wrap(WireLane, "_refuse_lacking", lambda right, self, address, needed: None)


# ---------------------------------------------------------------------- verification


@_found_by("verification.digests")
def attests_a_wrong_digest() -> None:
    """Of nodes, and the same one for its own as for those of others: so nothing else differs."""

    def attested(right: _Right, self: SumHashes, *arguments: Any) -> Iterator[Any]:
        for each in right(self, *arguments):
            wrong = bytes([each.digest[0] ^ 1]) + each.digest[1:]
            yield replace(each, digest=wrong) if len(each.node) > 1 else each

    wrap(SumHashes, "attested", attested)


@_found_by("verification.again")
def computes_others_grains_wrong() -> None:
    def take(right: _Right, self: Verification, grain: int, weight: float) -> None:
        right(self, grain, weight * (1 + 2**-20))

    wrap(Verification, "take", take)


@_found_by("verification.again")
def answers_for_the_wrong_grain() -> None:
    """Says of each grain that it verifies what it has computed for the next one."""

    def attested(right: _Right, self: Verification, itemised: frozenset[int]) -> Any:
        assert self._own.hashes is not None
        mine = len(list(self._own.hashes.attested(self._own.nodes)))
        said = right(self, itemised)
        others = [each for each in said[mine:] if len(each.node) == 1]
        next_ = {one.node: other for one, other in itertools.pairwise([*others, *others[:1]])}
        turned = (replace(next_.get(each.node, each), node=each.node) for each in said[mine:])
        return *said[:mine], *turned

    wrap(Verification, "attested", attested)


@_found_by("verification.relays")
def relays_none_of_its_sums() -> None:
    def receive(right: _Right, self: MeanChecks, node: Any, *, last: bool) -> Any:
        return right(self, replace(node, rank=node.rank + 99), last=last)

    wrap(MeanChecks, "_receive", receive)


@_found_by("verification.mean")
def takes_the_mean_that_came_for_its_own() -> None:
    def finish(right: _Right, *arguments: Any) -> Any:
        check = right(*arguments)
        return check and replace(check, expected=check.came, apart=None)

    wrap(MeanChecks, "finish", finish)
