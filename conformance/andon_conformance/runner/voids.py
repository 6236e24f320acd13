"""Voids: lost rounds, and how their work is reassigned (rules 1, 5 and 6; section 21)."""

from __future__ import annotations

import itertools
from functools import partial

from andon.protocol.records import PositionRange
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.runner.checks import Checks, require, require_above, same
from andon_conformance.runner.gradients import AssignedRound
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.rounds import bounds, expect_shares
from andon_conformance.runner.talk import shown

__all__ = ["CHECKS", "lose_one"]

CHECKS = Checks()


def _expect_shares_kept(
    round_: AssignedRound, following: AssignedRound, players: list[Player]
) -> None:
    """Demands that these members keep their positions of a void round in the next one."""
    kept = [
        [PositionRange(*bounds(each)) for each in round_.works[player].positions]
        for player in players
    ]
    expect_shares(following, kept)


@CHECKS.add("void.stream_end", "19.5", workers=2)
async def a_lost_stream_voids(line: LineUnderTest) -> None:
    """When a member's stream ends, the round is void: the others get a new key, without it."""
    round_, following, others = await lose_one(line)
    require_above(round_.key, following.key)
    for player in others:
        work = following.works[player]
        same("the roster", [each.worker for each in others], list(work.roster))
        same("the batch", shown(round_.works[player].batch), shown(work.batch))
        same("the parent", shown(round_.works[player].parent), shown(work.parent))
    await line.finish(following)


@CHECKS.add("void.shares", "21", workers=2)
async def shares_are_kept_and_reassigned(line: LineUnderTest) -> None:
    """After a loss all others keep their positions; the lost worker's are assigned by
    section 21.
    """
    round_, following, others = await lose_one(line)
    _expect_shares_kept(round_, following, others)
    await line.finish(following)


async def lose_one(line: LineUnderTest) -> tuple[AssignedRound, AssignedRound, list[Player]]:
    """The last member dies in a round; returns that round, the next one, and the survivors."""
    round_ = await line.averaged()
    *others, last = round_.players
    # Everybody but the last is ready: a server that forgets the lost one would commit.
    await line.all_ready(round_, others)
    await last.vanish()
    return round_, await line.not_committed(round_, others), others


@CHECKS.add("void.rejoin", "19.5")
async def a_rejoin_voids(line: LineUnderTest) -> None:
    """A member that joins again during a round voids it; nobody was lost, so shares are the
    same.
    """
    round_ = await line.deal()
    await round_.players[-1].join()
    following = await line.again(round_.players)
    require_above(round_.key, following.key)
    _expect_shares_kept(round_, following, round_.players)
    await line.finish(following)


@CHECKS.add("void.leave", "19.5", workers=2)
async def leaving_voids(line: LineUnderTest) -> None:
    """Leave voids the round, and the others go on."""
    round_ = await line.deal()
    *others, last = round_.players
    await last.leave(pb.LEAVE_REASON_INTERRUPTED)
    following = await line.again(others)
    require_above(round_.key, following.key)
    await line.finish(following)


@CHECKS.add("void.told", "20")
async def voids_are_told(line: LineUnderTest) -> None:
    """Members of a void round get RoundVoided or the next assignment."""
    round_ = await line.deal()
    await line.fault(round_, round_.players[-1], pb.FAULT_KIND_DATA_STREAM_LOST)
    for player in round_.players:
        await player.train.first(partial(_tells_void, round_), what="word of the void round")


def _tells_void(round_: AssignedRound, message: pb.TrainResponse) -> bool:
    match message.WhichOneof("message"):
        case "round_voided":
            return key_of(message.round_voided.key) == round_.key
        case "shard_assignment":
            return key_of(message.shard_assignment.key) > round_.key
    return False


@CHECKS.add("void.new_key", "19.1")
async def void_keys_are_not_used_again(line: LineUnderTest) -> None:
    """The next try at a step has a greater key, which was never used."""
    used = {key for _, key in line.keys}
    round_ = await line.deal()
    for _ in range(2):
        used.add(round_.key)
        following = await line.void(round_)
        require_above(round_.key, following.key)
        require(following.key not in used, "a key that was never used", following.key)
        round_ = following
    await line.finish(round_)


@CHECKS.add("void.old_ready", "19.6")
async def old_reports_are_ignored(line: LineUnderTest) -> None:
    """StepReady of an older key is ignored."""
    old = await line.deal()
    round_ = await line.void(old)
    await line.all_ready(old, round_.players)
    await line.fence(round_.players)
    # No member is ready for the current key, and none will be.
    await line.fault(round_, round_.players[-1], pb.FAULT_KIND_DATA_STREAM_LOST)
    await line.finish(await line.not_committed(round_, round_.players))


@CHECKS.add("scalar.mean", "15")
async def scalar_all_reduces_are_weighted(line: LineUnderTest) -> None:
    """Scalar all-reduce: the weighted mean in float64, in rank order, the same to all."""
    values, weights = (0.1, -7.25, 1e9, 3.0, 0.3), (3.0, 0.7, 11.0, 2.0, 0.1)
    total = products = 0.0
    for player, value, weight in zip(line.players, values, weights, strict=False):
        head = conversion.key_to_proto(player.head)
        await player.say(
            scalar_all_reduce=pb.ScalarAllReduce(head=head, sequence=0, value=value, weight=weight)
        )
        total += weight
        products += weight * value
    for player, result in (await line.all_take("scalar_all_reduce_result")).items():
        same(f"the mean at {player.name}:", products / total, result.value)
        same("the weight", total, result.weight)
        same("the contributors", len(line.players), result.contributors)


@CHECKS.add("key.rises", "19.1")
async def keys_rise(line: LineUnderTest) -> None:
    """Over all assignments so far, keys of rounds never fall or repeat."""
    await line.step()
    rounds = [key for what, key in line.keys if what == "a round"]
    for before, following in itertools.pairwise(rounds):
        require_above(before, following, "a round of a key")
