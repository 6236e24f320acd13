"""Rejoins: the join status of a returning worker, and how it catches up (rules 8 to 10)."""

from __future__ import annotations

import asyncio

from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_conformance.runner.checks import (
    Checks,
    NotApplicable,
    Violation,
    require,
    same,
)
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.talk import shown
from andon_conformance.runner.transfers import STATE, TransferEnds, meet, move, report

__all__ = ["CHECKS"]

CHECKS = Checks()


def _expect_status(accepted: pb.JoinAccepted, join_status: str) -> None:
    same("the join status", f"JOIN_STATUS_{join_status}", pb.JoinStatus.Name(accepted.join_status))


async def _join_in_sync(player: Player, head: Key | None) -> pb.JoinAccepted:
    """Joins, which must say that the player and the line are at this head."""
    accepted = await player.join()
    _expect_status(accepted, "IN_SYNC")
    same("the line's head", head, key_of(accepted.head))
    return accepted


@CHECKS.add("rejoin.in_sync", "2.3")
async def the_head_is_in_sync(line: LineUnderTest) -> None:
    """A worker whose head is the line's head is IN_SYNC."""
    await line.step()
    for player in line.players:
        accepted = await _join_in_sync(player, player.head)
        same("the step", player.step, accepted.step)


@CHECKS.add("rejoin.record_follows", "19.8")
async def a_missed_record_follows(line: LineUnderTest) -> None:
    """A worker that missed the last record and holds its key receives it again: RECORD_FOLLOWS."""
    player = line.players[-1]
    parent, step = player.head, player.step
    round_ = await line.deal()
    commits = await line.finish(round_)
    accepted = await _join_as_if(player, parent, step, held=round_.key)
    _expect_status(accepted, "RECORD_FOLLOWS")
    again = await player.train.take("step_committed")
    same("the record", shown(commits[player].record), shown(again.record))


async def _join_as_if(
    player: Player, head: Key | None, step: int, *, held: Key | None
) -> pb.JoinAccepted:
    """Joins as a worker that missed the last record and holds averages of key `held`."""
    return await player.join(
        head=conversion.key_to_proto(head),
        step=step,
        held_key=conversion.key_to_proto(held),
        cursor=None,
    )


async def _catches_up(line: LineUnderTest, player: Player, accepted: pb.JoinAccepted) -> None:
    """Demands that the player is BEHIND, and receives the state of the line's head."""
    _expect_status(accepted, "BEHIND")
    ends = await meet(line.players, player)
    head = ends.donor.head
    same("the transfer's head", head, key_of(ends.receive.head))
    same("the head at the sender", head, key_of(ends.send.head))
    arrived = await move(ends)
    require(arrived == STATE, "the sender's bytes", f"{len(arrived)} bytes, not the same")
    await report(ends)


@CHECKS.add("rejoin.behind", "19.8", workers=2)
async def who_holds_nothing_is_behind(line: LineUnderTest) -> None:
    """A worker that missed the last record and holds no averages is BEHIND, and receives the
    state.
    """
    player = line.players[-1]
    parent, step = player.head, player.step
    await line.step()
    await _catches_up(line, player, await _join_as_if(player, parent, step, held=None))


@CHECKS.add("rejoin.equal_step", "2.3", workers=2)
async def an_equal_step_does_not_count(line: LineUnderTest) -> None:
    """The head counts, not the step: a worker at another head than the line's is BEHIND."""
    player = line.players[-1]
    parent = player.head
    await line.step()
    await _catches_up(line, player, await _join_as_if(player, parent, player.step, held=None))


@CHECKS.add("rejoin.other_held", "19.8", workers=2)
async def another_held_key_is_behind(line: LineUnderTest) -> None:
    """A worker that holds the averages of another key than the last record's is BEHIND."""
    player = line.players[-1]
    parent, step = player.head, player.step
    void = await line.deal()
    await line.finish(await line.void(void))
    await _catches_up(line, player, await _join_as_if(player, parent, step, held=void.key))


@CHECKS.add("rejoin.fresh", "19.8", workers=2)
async def a_newcomer_is_behind(line: LineUnderTest) -> None:
    """A new process on a running line is BEHIND, receives the state, and is in the next round."""
    player = line.players[-1]
    await _catches_up(line, player, await player.come_anew())
    round_ = await line.deal()
    same("members of the next round:", len(line.players), len(round_.works))
    await line.finish(round_)


async def _transfer_begun(line: LineUnderTest) -> TransferEnds:
    """The transfer to the last player, which joined as a new process."""
    player = line.players[-1]
    await player.come_anew()
    return await meet(line.players, player)


@CHECKS.add("transfer.no_round", "19.10", workers=2)
async def no_round_runs_meanwhile(line: LineUnderTest) -> None:
    """No round runs while a state transfer does."""
    *others, player = line.players
    ends = await _transfer_begun(line)
    await line.ask(others)
    await line.quiet("shard_assignment", others, because="a state is on its way")
    await move(ends)
    await report(ends)
    await player.ask()
    await line.finish(await line.dealt(line.players))


@CHECKS.add("transfer.cancelled", "19.10", workers=2)
async def a_lost_receiver_frees_the_sender(line: LineUnderTest) -> None:
    """If the receiver of a state is lost, the sender's stream is closed, so that it does not
    wait.
    """
    ends = await _transfer_begun(line)
    await ends.joiner.vanish()
    await ends.donor.train.ends_with("ABORTED", "the sender's status")


@CHECKS.add("journal.head", "19.2", scene="restarting")
async def the_head_outlives_the_server(line: LineUnderTest) -> None:
    """A server that is killed and started again has the same head, under a greater term."""
    await line.step()
    head, term = line.players[0].head, line.players[0].accepted.term
    await _restart(line)
    for player in line.players:
        accepted = await _join_in_sync(player, head)
        require(accepted.term > term, f"a term above {term}", accepted.term)
    await line.step()


@CHECKS.add("journal.record", "19.2", scene="restarting")
async def the_record_outlives_the_server(line: LineUnderTest) -> None:
    """A record is durable before StepCommitted: a server killed then still has it for others."""
    player = line.players[0]
    parent, step = player.head, player.step
    round_ = await line.averaged()
    await line.all_ready(round_)
    # One worker has the record, so the server announced it: it must be durable by now.
    await line.record_of(player, round_)
    await _restart(line)
    # No player reports the record before the server shows that it knows it.
    accepted = await _join_as_if(player, parent, step, held=round_.key)
    _expect_status(accepted, "RECORD_FOLLOWS")
    same("the line's head", round_.key, key_of(accepted.head))
    again = await player.train.take("step_committed")
    same("the record's key", round_.key, key_of(again.record.key))


@CHECKS.add("journal.not_forward", "2.9", workers=2, scene="restarting")
async def nothing_is_rolled_forward(line: LineUnderTest) -> None:
    """A round that some workers were ready for, but that has no record, is not rolled forward."""
    head = line.players[0].head
    round_ = await line.averaged()
    await line.all_ready(round_, round_.players[:-1])
    # The reports must be with the server before it is killed.
    await line.fence(round_.players)
    await _restart(line)
    for player in line.players:
        await _join_in_sync(player, head)
    await line.step()


async def _restart(line: LineUnderTest) -> None:
    """Kills the server with SIGKILL, and starts it again."""
    if line.server is None:
        raise NotApplicable("give --start, so that the server can be killed")
    # SIGKILL: nothing is written that was not written before.
    await line.server.kill()
    for player in line.players:
        await player.vanish()
    await line.server.start()
    # The server answers on a new connection; the players' own ones may still wait to try again.
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
