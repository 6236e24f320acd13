"""Grains: who may join a line in grains, how they are assigned, and the losses of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.capabilities import WORKER_CAPABILITIES
from andon.protocol.grains import Grains
from andon.protocol.records import PositionRange
from andon.protocol.schedules import BALANCE_CAPABILITY
from andon.protocol.shards import Split
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.runner.checks import Checks, require, same
from andon_conformance.runner.gradients import AssignedRound
from andon_conformance.runner.halts import expect_halts
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import refused_join
from andon_conformance.runner.rounds import bounds
from andon_conformance.runner.tree import along, grains_of, losses_of
from andon_conformance.runner.voids import lose_one

__all__ = ["CHECKS"]

CHECKS = Checks()

_LOSSES = (1e16, 1.0, 1.0, 1.0)
"""Of each grain: their sum is another one in the order of ranks."""


@CHECKS.add("grain.capability", "31", scene="grains")
async def workers_know_grains(line: LineUnderTest) -> None:
    """A worker that lacks same-bits.v1 is refused: CAPABILITY."""
    lacking = [BALANCE_CAPABILITY, *WORKER_CAPABILITIES]
    status = await refused_join(line.target, capabilities=lacking)
    same("the refusal", "FAILED_PRECONDITION CAPABILITY", status.named)


@CHECKS.add("grain.tree", "35", scene="grains")
async def there_is_one_tree(line: LineUnderTest) -> None:
    """A worker whose plan has another version of the tree is refused: SAME_BITS."""
    plan = conversion.plan_to_proto(line.target.plan)
    plan.tree += 1
    status = await refused_join(line.target, plan=plan)
    same("the refusal", "FAILED_PRECONDITION SAME_BITS", status.named)


def _expect_grains(
    line: LineUnderTest, round_: AssignedRound, kept: Sequence[Sequence[PositionRange]]
) -> None:
    """Demands the shares of section 31."""
    grain, first = line.target.plan.grain, round_.works[round_.players[0]]
    start, stop = bounds(first.batch)
    _, count = grains_of(first, grain)
    split = Split(tuple(first.targets))
    shares = Grains(PositionRange(0, count), 1).deal(kept, split)
    for player, share in zip(round_.players, shares, strict=True):
        work = round_.works[player]
        require(not work.interleaved, "shares that are not interleaved", "interleaved")
        same("micro_batches", 0, work.micro_batches)
        grains_of(work, grain)
        wanted = [
            (start + part.start * grain, min(start + part.stop * grain, stop)) for part in share
        ]
        came = list(map(bounds, work.positions))
        same(f"the positions of {player.name}, of {start} to {stop}:", wanted, came)


@CHECKS.add("grain.shares", "31", scene="grains")
async def shares_are_whole_grains(line: LineUnderTest) -> None:
    """Over an epoch's end, shares are whole grains, which are assigned as section 21 says."""
    for _ in range(3):
        round_ = await line.deal()
        _expect_grains(line, round_, [() for _ in round_.players])
        await line.finish(round_)


@CHECKS.add("grain.kept", "31", workers=2, scene="grains")
async def grains_are_kept(line: LineUnderTest) -> None:
    """After a loss all others keep their grains; the lost worker's are assigned whole."""
    round_, following, others = await lose_one(line)
    kept = []
    for player in others:
        grains, _ = grains_of(round_.works[player], line.target.plan.grain)
        kept.append([PositionRange(each, each + 1) for each in sorted(grains)])
    _expect_grains(line, following, kept)
    await line.finish(following)


@CHECKS.add("grain.loss", "34", workers=3, scene="grains")
async def losses_are_along_the_tree(line: LineUnderTest) -> None:
    """A step's loss is the root's loss over its weight, both added along the tree in float64."""
    grain = line.target.plan.grain
    for _ in range(3):
        round_ = await line.averaged()
        for player in round_.players:
            nodes = losses_of(round_.works[player], grain, _LOSSES.__getitem__)
            await line.ready(round_, player, node_losses=nodes)
        batch = round_.works[round_.players[0]].batch
        size = batch.stop - batch.start
        weights = [float(min(grain, size - at)) for at in range(0, size, grain)]
        losses = [weight * _LOSSES[at] for at, weight in enumerate(weights)]
        root = (0, len(weights))
        loss = along(losses, root, float.__add__) / along(weights, root, float.__add__)
        for committed in (await line.committed(round_)).values():
            same("the loss", loss, committed.loss)


@CHECKS.add("grain.nodes", "34", scene="grains")
async def nodes_are_the_shares(line: LineUnderTest) -> None:
    """Losses of other nodes than those of a worker's share halt the line: PROTOCOL_VIOLATION."""
    round_ = await line.averaged()
    # Rank 0 always has a grain. Its weight is right, so that only the node is wrong.
    bad, *others = round_.players
    nodes = losses_of(round_.works[bad], line.target.plan.grain)
    nodes[0].grains += 1
    await line.ready(round_, bad, node_losses=nodes)
    await line.all_ready(round_, others)
    for evidence in (await expect_halts(line, "PROTOCOL_VIOLATION")).values():
        require(evidence.HasField("worker"), "the worker at fault", "none")
        same("the worker", bad.worker, evidence.worker)


@CHECKS.add("grain.weight", "34", scene="grains")
async def weights_are_compared(line: LineUnderTest) -> None:
    """A step whose root has another weight than the averages is not committed."""
    round_ = await line.averaged()
    head = line.players[0].head
    bad, *others = round_.players
    nodes = losses_of(round_.works[bad], line.target.plan.grain)
    wrong = pb.NodeLoss(
        first=nodes[0].first, grains=nodes[0].grains, weight=77.0, loss_sum=nodes[0].loss_sum
    )
    await line.all_ready(round_, others)
    await line.ready(round_, bad, node_losses=[wrong, *nodes[1:]])
    # Whoever received a record nevertheless would join from it.
    await line.gather()
    for player in line.players:
        same(f"the head of {player.name}, to which nothing was added:", head, player.head)
