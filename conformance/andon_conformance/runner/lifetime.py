"""The bootstrap and the end of a run. Each is played once, and several checks look at it."""

from __future__ import annotations

import asyncio
from typing import Any

from andon.protocol.encoding import Encoding
from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import Checks, Violation, require, same
from andon_conformance.runner.line import BootstrapSeen, LineUnderTest
from andon_conformance.runner.player import Player, key_of, refused_join
from andon_conformance.runner.talk import shown
from andon_conformance.runner.transfers import STATE, meet, move, report

__all__ = ["BOOTSTRAP", "ENDING", "bootstrap"]

BOOTSTRAP = Checks()


async def bootstrap(line: LineUnderTest, *, watch: bool) -> None:
    """Bootstraps the line; `watch` also waits for messages that must not come."""
    try:
        await _bootstrap(line, line.bootstrapping, watch=watch)
    except Violation as broken:
        line.bootstrapping.broken = broken


async def _bootstrap(line: LineUnderTest, seen: BootstrapSeen, *, watch: bool) -> None:
    players = line.players
    if len(players) > 1 and watch:
        plan = conversion.plan_to_proto(line.target.plan)
        plan.dataset_size = len(players) - 1
        seen.too_small = await refused_join(line.target, slot=0, plan=plan)
    # All but one, so that the line has every reason but one to begin.
    for player in players[:-1]:
        seen.accepted.append(await player.join())
    if len(players) > 1:
        seen.early = await _waited(players[:-1], line.target.quiet_s if watch else 0.0)
    seen.accepted.append(await players[-1].join())
    first = min(players, key=lambda player: player.worker)
    record = (await first.train.take("step_committed", what="the record INITIAL")).record
    # The first worker asks for work, and must get none while others still lack its state.
    await first.ask()
    await asyncio.gather(
        *(_carry(line, seen, player, watch=watch) for player in players if player is not first)
    )
    # Only the first worker may get the record: for the others a state is on its way.
    others = [
        (player, each.record)
        for player in players if player is not first
        for each in player.train.cases("step_committed")
    ]  # fmt: skip
    seen.initial_workers = [(first, record), *others]
    line.keys.append(("the record INITIAL", key_of(record.key)))


async def _waited(players: list[Player], quiet_s: float) -> list[str]:
    await asyncio.sleep(quiet_s)
    came = []
    for player in players:
        await player.fence()
        came += [f"{shown(each)} at {player.name}" for each in player.train.inbox]
    return came


async def _carry(line: LineUnderTest, seen: BootstrapSeen, player: Player, *, watch: bool) -> None:
    ends = await meet(line.players, player)
    seen.moved.append(await move(ends))
    seen.transfers.append(ends)
    if watch and seen.busy is None:
        seen.busy = []
        await asyncio.sleep(line.target.quiet_s)
        # The transfer is not reported yet, so it still runs for the server.
        for each in line.players:
            await each.fence()
            seen.busy += [shown(work) for work in each.train.cases("shard_assignment")]
    await report(ends)


def _reached(line: LineUnderTest, name: str) -> Any:
    """Something that the suite saw; `Violation` if the bootstrap did not get so far."""
    seen = getattr(line.bootstrapping, name)
    if seen is None or (isinstance(seen, list) and not seen and line.bootstrapping.broken):
        raise line.bootstrapping.broken or Violation(f"the bootstrap to reach {name}", "it did not")
    return seen


@BOOTSTRAP.add("join.fresh", "3", scene="bootstrap")
async def join_is_answered_whole(line: LineUnderTest) -> None:
    """JoinAccepted of a line without a head is complete, and says FRESH."""
    accepted = _reached(line, "accepted")
    plan = conversion.plan_to_proto(line.target.plan)
    for answer in accepted:
        same("the join status", pb.JOIN_STATUS_FRESH, answer.join_status)
        require(not answer.HasField("head"), "no head", shown(answer.head))
        same("step", 0, answer.step)
        require(answer.session_token, "a session token", "none")
        same("the plan", shown(plan), shown(answer.plan))
        chunk = answer.policy.chunk_elements
        most = MAX_PAYLOAD_BYTES // 4
        require(0 < chunk <= most, f"chunk_elements from 1 to {most}, which fit a payload", chunk)
        encodings = [each.value for each in Encoding]
        require(answer.policy.encoding in encodings, "a policy with an encoding", answer.policy)
        liveness = answer.liveness
        require(
            0 < liveness.heartbeat_s < liveness.lease_s,
            "heartbeats more often than leases end",
            f"heartbeat_s {liveness.heartbeat_s}, lease_s {liveness.lease_s}",
        )
        require(answer.term >> 32, "a term with a counter in its high half", answer.term)
        require(not answer.HasField("halt"), "no halt", "a halt")
    if line.bootstrapping.broken and len(accepted) < len(line.players):
        raise line.bootstrapping.broken


@BOOTSTRAP.add("join.slot", "1", scene="bootstrap")
async def slots_are_kept(line: LineUnderTest) -> None:
    """A worker's id is the slot that it asked for."""
    for slot, answer in enumerate(_reached(line, "accepted")):
        same(f"the id of the worker in slot {slot}:", slot, answer.worker)


@BOOTSTRAP.add("join.dataset_too_small", "9", workers=2, scene="bootstrap")
async def small_datasets_are_refused(line: LineUnderTest) -> None:
    """A dataset with fewer samples than the line has workers is refused: DATASET_TOO_SMALL."""
    status = _reached(line, "too_small")
    same("the refusal", "FAILED_PRECONDITION DATASET_TOO_SMALL", status.named)


@BOOTSTRAP.add("bootstrap.waits", "19.11", workers=2, scene="bootstrap")
async def bootstrap_waits(line: LineUnderTest) -> None:
    """Nothing is bootstrapped before all expected workers are there."""
    early = _reached(line, "early")
    require(not early, "nothing before the last worker joined", "; ".join(early))


@BOOTSTRAP.add("bootstrap.record", "19.11", scene="bootstrap")
async def one_worker_bootstraps(line: LineUnderTest) -> None:
    """One worker's weights become record INITIAL at step 0; its roster is the lowest worker
    alone.
    """
    initial_workers = _reached(line, "initial_workers")
    same("workers that received the record:", 1, len(initial_workers))
    first, record = initial_workers[0]
    same("the record's kind", record_pb2.RECORD_KIND_INITIAL, record.kind)
    same("its roster", [first.worker], list(record.roster))
    same("its step", 0, record.step)
    same("its cursor", (0, 0), (record.cursor.epoch, record.cursor.position))
    require(not record.HasField("parent"), "no parent", shown(record.parent))
    require(
        record.key.term >= first.accepted.term and record.key.round,
        f"a key of the term {first.accepted.term} or a later one",
        shown(record.key),
    )


@BOOTSTRAP.add("bootstrap.transfer", "19.11", workers=2, scene="bootstrap")
async def others_get_the_state(line: LineUnderTest) -> None:
    """The others get the first worker's state, named by the INITIAL record, byte for byte."""
    initial_workers = _reached(line, "initial_workers")
    head = key_of(initial_workers[0][1].key)
    same("states that arrived:", len(line.players) - 1, len(line.bootstrapping.moved))
    for arrived in line.bootstrapping.moved:
        require(arrived == STATE, "the state's own bytes", f"{len(arrived)} bytes, not the same")
    for ends in line.bootstrapping.transfers:
        same("the receiver's head", head, key_of(ends.receive.head))
        same("the sender's head", head, key_of(ends.send.head))
        same("the sender's role", pb.TRANSFER_ROLE_SEND, ends.send.role)
        same("the sender's peer", ends.joiner.worker, ends.send.peer)


@BOOTSTRAP.add("bootstrap.no_round", "19.10", workers=2, scene="bootstrap")
async def no_round_runs_meanwhile(line: LineUnderTest) -> None:
    """No round runs while a state transfer does."""
    busy = _reached(line, "busy") if line.bootstrapping.busy is None else line.bootstrapping.busy
    require(not busy, "no ShardAssignment while a state moves", "; ".join(busy))


ENDING = Checks()

_WHY = "the suite has seen enough"


async def end(line: LineUnderTest) -> None:
    """Takes the last step and leaves, once."""
    seen = line.ending
    if seen.played:
        return
    seen.played = True
    try:
        round_ = await line.averaged()
        for rank, player in enumerate(round_.players):
            # One reason is enough: whoever has none must be told of it.
            await line.ready(round_, player, stop_reason=_WHY if rank == 0 else "")
        seen.commits = await line.committed(round_)
        for player in line.players:
            await player.leave(pb.LEAVE_REASON_COMPLETE, bytes(range(32)))
        seen.status = await _await_end(line)
        seen.late = await refused_join(line.target, slot=0)
    except Violation as broken:
        seen.broken = broken


async def _await_end(line: LineUnderTest) -> pb.LineStatus:
    """The status once the line is complete, or at the end of the patience."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + line.target.patience_s
    while True:
        status = await line.status()
        if status.state == pb.LINE_STATE_COMPLETE or loop.time() > deadline:
            return status
        await asyncio.sleep(0.02)


def _left(line: LineUnderTest, seen: Any, what: str) -> Any:
    """Something that the suite saw; `Violation` if the run did not end so far."""
    if not seen:
        raise line.ending.broken or Violation(what, "nothing")
    return seen


@ENDING.add("end.stop", "22", scene="ending")
async def a_stop_is_told_to_all(line: LineUnderTest) -> None:
    """The stop_reason of a StepReady is in everybody's StepCommitted."""
    await end(line)
    commits = _left(line, line.ending.commits, "the last record")
    for player, committed in commits.items():
        same(f"the stop reason at {player.name}:", _WHY, committed.stop_reason)


@ENDING.add("end.complete", "22", scene="ending")
async def the_line_is_complete(line: LineUnderTest) -> None:
    """When all left as COMPLETE with equal digests, GetStatus says COMPLETE."""
    await end(line)
    status = _left(line, line.ending.status, "a status after the end")
    same("the line's state", "LINE_STATE_COMPLETE", pb.LineState.Name(status.state))


@ENDING.add("end.refused", "20", scene="ending")
async def nobody_joins_after_the_end(line: LineUnderTest) -> None:
    """A line that is over refuses a Join: COMPLETE."""
    await end(line)
    status = _left(line, line.ending.late, "a Join after the end to be ended")
    same("the refusal", "FAILED_PRECONDITION COMPLETE", status.named)
