"""Rejoins: the join status of a returning worker, and how it catches up (rules 8 to 10)."""

from __future__ import annotations

import asyncio

from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.runner.checks import (
    NotApplicable,
    ServerCheck,
    Violation,
    check,
    require,
    same,
)
from andon_conformance.runner.gradients import exchange
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.talk import shown
from andon_conformance.runner.transfers import STATE, meet, move, report

__all__ = ["CHECKS"]


def _stands(accepted: pb.JoinAccepted, join_status: str) -> None:
    same("the join status", f"JOIN_STATUS_{join_status}", pb.JoinStatus.Name(accepted.join_status))


@check("rejoin.in_sync", "2.3", "A worker whose head is the line's head is IN_SYNC")
async def the_head_is_in_sync(line: LineUnderTest) -> None:
    await line.finish(await line.deal())
    for player in line.players:
        accepted = await player.join()
        _stands(accepted, "IN_SYNC")
        same("the line's head", player.head, key_of(accepted.head))
        same("the step", player.step, accepted.step)


@check(
    "rejoin.record_follows",
    "19.8",
    "A worker that missed the last record and holds its key receives it again: RECORD_FOLLOWS",
)
async def a_missed_record_follows(line: LineUnderTest) -> None:
    parent, step = line.players[-1].head, line.players[-1].step
    round_ = await line.deal()
    commits = await line.finish(round_)
    player = line.players[-1]
    accepted = await _as_if_before(player, parent, step, held=round_.key)
    _stands(accepted, "RECORD_FOLLOWS")
    again = await player.train.take("step_committed")
    same("the record", shown(commits[player].record), shown(again.record))


async def _as_if_before(
    player: Player, head: Key | None, step: int, *, held: Key | None
) -> pb.JoinAccepted:
    """Joins as a worker that missed the last record and holds averages of key `held`."""
    return await player.join(
        head=conversion.key_to_proto(head),
        step=step,
        held_key=conversion.key_to_proto(held),
        cursor=None,
    )


@check(
    "rejoin.behind",
    "19.8",
    "A worker that missed the last record and holds no averages is BEHIND, and receives the state",
    workers=2,
)
async def who_holds_nothing_is_behind(line: LineUnderTest) -> None:
    player = line.players[-1]
    parent, step = player.head, player.step
    await line.finish(await line.deal())
    accepted = await _as_if_before(player, parent, step, held=None)
    _stands(accepted, "BEHIND")
    await _catches_up(line, player)


@check(
    "rejoin.equal_step",
    "2.3",
    "The head counts, not the step: a worker at another head than the line's is BEHIND",
    workers=2,
)
async def an_equal_step_does_not_count(line: LineUnderTest) -> None:
    player = line.players[-1]
    parent = player.head
    await line.finish(await line.deal())
    accepted = await _as_if_before(player, parent, player.step, held=None)
    _stands(accepted, "BEHIND")
    await _catches_up(line, player)


@check(
    "rejoin.other_held",
    "19.8",
    "A worker that holds the averages of another key than the last record's is BEHIND",
    workers=2,
)
async def another_held_key_is_behind(line: LineUnderTest) -> None:
    player = line.players[-1]
    parent, step = player.head, player.step
    void = await line.deal()
    await line.finish(await line.void(void))
    accepted = await _as_if_before(player, parent, step, held=void.key)
    _stands(accepted, "BEHIND")
    await _catches_up(line, player)


@check(
    "rejoin.fresh",
    "19.8",
    "A new process on a running line is BEHIND, receives the state, and is in the next round",
    workers=2,
)
async def a_newcomer_is_behind(line: LineUnderTest) -> None:
    player = line.players[-1]
    accepted = await player.come_anew()
    _stands(accepted, "BEHIND")
    await _catches_up(line, player)
    round_ = await line.deal()
    same("members of the next round:", len(line.players), len(round_.works))
    await line.finish(round_)


async def _catches_up(line: LineUnderTest, player: Player) -> None:
    ends = await meet(line.players, player)
    head = ends.donor.head
    same("the transfer's head", head, key_of(ends.receive.head))
    same("the head at the sender", head, key_of(ends.send.head))
    arrived = await move(ends)
    require(arrived == STATE, "the sender's bytes", f"{len(arrived)} bytes, not the same")
    await report(ends)


@check(
    "transfer.no_round",
    "19.10",
    "No round runs while a state transfer does",
    workers=2,
)
async def no_round_runs_meanwhile(line: LineUnderTest) -> None:
    player, others = line.players[-1], line.players[:-1]
    await player.come_anew()
    ends = await meet(line.players, player)
    for each in others:
        await each.ask()
    await line.quiet("shard_assignment", others, because="a state is on its way")
    await move(ends)
    await report(ends)
    await player.ask()
    await line.finish(await line.dealt(line.players))


@check(
    "transfer.cancelled",
    "19.10",
    "If the receiver of a state is lost, the sender's stream is closed, so that it does not wait",
    workers=2,
)
async def a_lost_receiver_frees_the_sender(line: LineUnderTest) -> None:
    player = line.players[-1]
    await player.come_anew()
    ends = await meet(line.players, player)
    await player.vanish()
    same("the sender's status", "ABORTED", (await ends.donor.train.end()).code.name)


@check(
    "journal.head",
    "19.2",
    "A server that is killed and started again has the same head, under a greater term",
    scene="restarting",
)
async def the_head_outlives_the_server(line: LineUnderTest) -> None:
    await line.finish(await line.deal())
    head, term = line.players[0].head, line.players[0].accepted.term
    await _restart(line)
    for player in line.players:
        accepted = await player.join()
        _stands(accepted, "IN_SYNC")
        same("the line's head", head, key_of(accepted.head))
        require(accepted.term > term, f"a term above {term}", accepted.term)
    await line.finish(await line.deal())


@check(
    "journal.record",
    "19.2",
    "A record is durable before StepCommitted: a server killed then still has it for others",
    scene="restarting",
)
async def the_record_outlives_the_server(line: LineUnderTest) -> None:
    player = line.players[0]
    parent, step = player.head, player.step
    round_ = await line.deal()
    await exchange(round_)
    for each in round_.players:
        await line.ready(round_, each)
    await line.record_of(player, round_)
    await _restart(line)
    # No player reports the record before the server shows that it knows it.
    accepted = await _as_if_before(player, parent, step, held=round_.key)
    _stands(accepted, "RECORD_FOLLOWS")
    same("the line's head", round_.key, key_of(accepted.head))
    again = await player.train.take("step_committed")
    same("the record's key", round_.key, key_of(again.record.key))


@check(
    "journal.not_forward",
    "2.9",
    "A round that some workers were ready for, but that has no record, is not rolled forward",
    workers=2,
    scene="restarting",
)
async def nothing_is_rolled_forward(line: LineUnderTest) -> None:
    head = line.players[0].head
    round_ = await line.deal()
    await exchange(round_)
    for player in round_.players[:-1]:
        await line.ready(round_, player)
    for player in round_.players:
        await player.fence()
    await _restart(line)
    for player in line.players:
        accepted = await player.join()
        _stands(accepted, "IN_SYNC")
        same("the line's head", head, key_of(accepted.head))
    await line.finish(await line.deal())


async def _restart(line: LineUnderTest) -> None:
    """Kills the server with SIGKILL, and starts it again."""
    if line.server is None:
        raise NotApplicable("give --start, so that the server can be killed")
    await line.server.kill()
    for player in line.players:
        await player.vanish()
    await line.server.start()
    deadline = asyncio.get_running_loop().time() + line.target.patience_s
    while True:
        try:
            await line.status()
        except Violation:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


CHECKS: tuple[ServerCheck, ...] = (
    the_head_is_in_sync,
    a_missed_record_follows,
    who_holds_nothing_is_behind,
    an_equal_step_does_not_count,
    another_held_key_is_behind,
    a_newcomer_is_behind,
    no_round_runs_meanwhile,
    a_lost_receiver_frees_the_sender,
    the_head_outlives_the_server,
    the_record_outlives_the_server,
    nothing_is_rolled_forward,
)
