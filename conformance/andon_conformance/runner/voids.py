"""Voids: lost rounds, and how their work is reassigned (rules 1, 5 and 6; section 21)."""

from __future__ import annotations

import itertools
from functools import partial

from andon.protocol.records import PositionRange
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.runner.checks import ServerCheck, check, require, same
from andon_conformance.runner.gradients import AssignedRound, exchange
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.rounds import expect_shares
from andon_conformance.runner.talk import shown

__all__ = ["CHECKS"]


def _positions(round_: AssignedRound, player: Player) -> list[PositionRange]:
    return [PositionRange(each.start, each.stop) for each in round_.works[player].positions]


@check(
    "void.stream_end",
    "19.5",
    "When a member's stream ends, the round is void: the others get a new key, without it",
    workers=2,
)
async def a_lost_stream_voids(line: LineUnderTest) -> None:
    round_, following, others = await _lose_one(line)
    require(following.key > round_.key, f"a key above {round_.key}", following.key)
    for player in others:
        work = following.works[player]
        same("the roster", [each.worker for each in others], list(work.roster))
        same("the batch", shown(round_.works[player].batch), shown(work.batch))
        same("the parent", shown(round_.works[player].parent), shown(work.parent))
    await line.finish(following)


@check(
    "void.shares",
    "21",
    "After a loss all others keep their positions; the lost worker's are assigned by section 21",
    workers=2,
)
async def shares_are_kept_and_reassigned(line: LineUnderTest) -> None:
    round_, following, others = await _lose_one(line)
    expect_shares(following, [_positions(round_, player) for player in others])
    await line.finish(following)


async def _lose_one(line: LineUnderTest) -> tuple[AssignedRound, AssignedRound, list[Player]]:
    """The last member dies in a round; returns that round, the next one, and the survivors."""
    round_ = await line.deal()
    await exchange(round_)
    *others, last = round_.players
    for player in others:
        await line.ready(round_, player)
    await last.vanish()
    return round_, await line.not_committed(round_, others), others


@check(
    "void.rejoin",
    "19.5",
    "A member that joins again during a round voids it; nobody was lost, so shares are the same",
)
async def a_rejoin_voids(line: LineUnderTest) -> None:
    round_ = await line.deal()
    member = round_.players[-1]
    await member.join()
    following = await line.again(round_.players)
    require(following.key > round_.key, f"a key above {round_.key}", following.key)
    expect_shares(following, [_positions(round_, player) for player in round_.players])
    await line.finish(following)


@check("void.leave", "19.5", "Leave voids the round, and the others go on", workers=2)
async def leaving_voids(line: LineUnderTest) -> None:
    round_ = await line.deal()
    *others, last = round_.players
    await last.leave(pb.LEAVE_REASON_INTERRUPTED)
    following = await line.again(others)
    require(following.key > round_.key, f"a key above {round_.key}", following.key)
    await line.finish(following)


@check("void.told", "20", "Members of a void round get RoundVoided or the next assignment")
async def voids_are_told(line: LineUnderTest) -> None:
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


@check("void.new_key", "19.1", "The next try at a step has a greater key, which was never used")
async def void_keys_are_not_used_again(line: LineUnderTest) -> None:
    used = {key for _, key in line.keys}
    round_ = await line.deal()
    for _ in range(2):
        used.add(round_.key)
        following = await line.void(round_)
        require(following.key > round_.key, f"a key above {round_.key}", following.key)
        require(following.key not in used, "a key that was never used", following.key)
        round_ = following
    await line.finish(round_)


@check("void.old_ready", "19.6", "StepReady of an older key is ignored")
async def old_reports_are_ignored(line: LineUnderTest) -> None:
    old = await line.deal()
    round_ = await line.void(old)
    for player in round_.players:
        await line.ready(old, player)
    for player in round_.players:
        await player.fence()
    # No member is ready for the current key, and none will be.
    await line.fault(round_, round_.players[-1], pb.FAULT_KIND_DATA_STREAM_LOST)
    await line.finish(await line.not_committed(round_, round_.players))


@check(
    "scalar.mean",
    "15",
    "Scalar all-reduce: the weighted mean in float64, in rank order, the same to all",
)
async def scalar_all_reduces_are_weighted(line: LineUnderTest) -> None:
    values, weights = (0.1, -7.25, 1e9, 3.0), (3.0, 0.7, 11.0, 2.0)
    total = products = 0.0
    for rank, player in enumerate(line.players):
        head = conversion.key_to_proto(player.head)
        scalar_all_reduce = pb.ScalarAllReduce(
            head=head, sequence=0, value=values[rank], weight=weights[rank]
        )
        await player.say(scalar_all_reduce=scalar_all_reduce)
        total += weights[rank]
        products += weights[rank] * values[rank]
    for player in line.players:
        result = await player.train.take("scalar_all_reduce_result")
        same(f"the mean at {player.name}:", products / total, result.value)
        same("the weight", total, result.weight)
        same("the contributors", len(line.players), result.contributors)


@check("key.rises", "19.1", "Over all assignments so far, keys of rounds never fall or repeat")
async def keys_rise(line: LineUnderTest) -> None:
    await line.finish(await line.deal())
    rounds = [key for what, key in line.keys if what == "a round"]
    for before, following in itertools.pairwise(rounds):
        require(following > before, f"a round after {before} to have a greater key", following)


CHECKS: tuple[ServerCheck, ...] = (
    a_lost_stream_voids,
    shares_are_kept_and_reassigned,
    a_rejoin_voids,
    leaving_voids,
    voids_are_told,
    void_keys_are_not_used_again,
    old_reports_are_ignored,
    scalar_all_reduces_are_weighted,
    keys_rise,
)
