"""The line under test: its players, and the steps that many checks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion
from andon_conformance.runner.checks import Violation, same
from andon_conformance.runner.gradients import AssignedRound, Parts
from andon_conformance.runner.player import Player, ServerUnderTest, key_of
from andon_conformance.runner.server import ServerProcess
from andon_conformance.runner.talk import Status, status_of
from andon_conformance.runner.transfers import TransferEnds, carry
from andon_conformance.runner.tree import losses_of

__all__ = ["BootstrapSeen", "EndingSeen", "LineUnderTest"]

_SECONDS_PER_SAMPLE = 0.001
"""What worker 0 says that it takes."""
_LOOK_S = 0.01


@dataclass(eq=False)
class BootstrapSeen:
    """What the suite saw during the bootstrap; None where it did not get so far."""

    accepted: list[pb.JoinAccepted] = field(default_factory=list)
    """In the order of the players."""
    too_small: Status | None = None
    """How the server ended a Join whose dataset has fewer samples than the line has workers."""
    early: list[str] | None = None
    """What came before the last worker was there."""
    initial_workers: list[tuple[Player, Any]] | None = None
    """The players that received the INITIAL record, each with the record."""
    moved: list[bytes] = field(default_factory=list)
    """The states that arrived at the others."""
    transfers: list[TransferEnds] = field(default_factory=list)
    """The transfers that brought these states."""
    busy: list[str] | None = None
    """Assignments that came while a state was on its way."""
    broken: Violation | None = None
    """Where it ended before its time."""


@dataclass(eq=False)
class EndingSeen:
    """What the suite saw as the run ended; None where it did not get so far."""

    commits: dict[Player, Any] = field(default_factory=dict)
    status: pb.LineStatus | None = None
    late: Status | None = None
    """How a Join after the end was ended."""
    broken: Violation | None = None
    played: bool = False


@dataclass(eq=False)
class LineUnderTest:
    """Everything that a check may use. Methods that wait raise `Violation`, as those of `Talk`."""

    target: ServerUnderTest
    players: list[Player]
    bootstrapping: BootstrapSeen = field(default_factory=BootstrapSeen)
    ending: EndingSeen = field(default_factory=EndingSeen)
    server: ServerProcess | None = None
    """The server's process, if the suite started it."""
    keys: list[tuple[str, Key]] = field(default_factory=list)
    """Every key that the server assigned, and for what."""
    limps: bool = False
    """Whether an ordinary step between two checks failed, so that none is tried again."""

    async def gather(self) -> None:
        """Brings everybody onto the line with new streams: in sync, idle, and no halt."""
        # A Join replaces the worker's older stream, which voids whatever still runs.
        for player in self.players:
            # One after the other: each Join must find the older stream's rounds void already.
            await player.close_bulk()
            await player.join()
            await player.drop_older()
        # Only now, because a halt may have come while they joined.
        status = await self.status()
        if status.HasField("halt"):
            await self.clear_halt(status.halt.id)
            await self.all_take("resume")
        for player in self.players:
            await self.follow(player)

    async def rest(self) -> None:
        """Gathers everybody, whatever the last check did to them. Raises as `gather`."""
        await self._gather_anew()
        # After a void round a server may hold back the next one: a committed step ends that.
        if self.keys and self.keys[-1][0] == "a round" and not self.limps:
            try:
                await self.step()
            except Violation:
                self.limps = True
                await self._gather_anew()

    async def _gather_anew(self) -> None:
        """Gathers everybody; a player that can't reach the others' head joins as a new process."""
        try:
            await self.gather()
        except Violation:
            heads = [player.head for player in self.players if player.head is not None]
            greatest = max(heads, default=None)
            # Heads are keys, and keys only rise: whoever is not at the greatest one has missed a
            # record.
            for player in self.players:
                if player.head != greatest:
                    await player.come_anew()
            await self.gather()

    async def follow(self, player: Player) -> None:
        """Does what a worker's join status asks for; then it is in sync."""
        join_status = player.accepted.join_status
        if join_status == pb.JOIN_STATUS_RECORD_FOLLOWS:
            await player.train.take("step_committed")
        elif join_status == pb.JOIN_STATUS_BEHIND:
            await self._train_until_transfer(player)
            await carry(self.players, player)
        elif join_status != pb.JOIN_STATUS_IN_SYNC:
            raise Violation(
                "join_status IN_SYNC, BEHIND or RECORD_FOLLOWS", _status_name(join_status)
            )

    async def _train_until_transfer(self, joiner: Player) -> None:
        """The others take the steps that the server puts before the transfer to a player, if any.

        After a transfer that failed, a server lets the others train for a while. It begins no
        transfer during a round, so players that only wait would wait in vain.
        """
        others = [each for each in self.players if each is not joiner and each.head is not None]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.target.patience_s
        await self.ask(others)
        while not joiner.train.cases("state_transfer"):
            if loop.time() > deadline or joiner.train.status is not None:
                raise Violation(f"state_transfer at {joiner.name}", "none in time")
            if others and all(each.train.cases("shard_assignment") for each in others):
                await self.finish(await self.dealt(others))
                await self.ask(others)
            await asyncio.sleep(_LOOK_S)

    async def deal(self, players: Sequence[Player] = ()) -> AssignedRound:
        """Everybody asks for work, and gets it: a round of one key."""
        members = list(players or self.players)
        await self.ask(members)
        return await self.dealt(members)

    async def averaged(self) -> AssignedRound:
        """A round in which every member holds all averages, and nobody is ready."""
        round_ = await self.deal()
        await round_.exchange()
        return round_

    async def step(self) -> dict[Player, pb.StepCommitted]:
        """Takes an ordinary step; see `finish`."""
        return await self.finish(await self.deal())

    async def right_averages(
        self, parts_of: Callable[[AssignedRound], Parts] = AssignedRound.rough_parts
    ) -> tuple[AssignedRound, Parts, dict[Player, list[Any]]]:
        """A round whose averages are those of the reference; with what was sent and what came."""
        round_ = await self.deal()
        parts = parts_of(round_)
        got = await round_.exchange(parts)
        round_.expect_averages(parts, got)
        return round_, parts, got

    async def dealt(self, players: Iterable[Player]) -> AssignedRound:
        """The round that comes next to these players."""
        works = {player: await _assignment(player) for player in players}
        greatest = max(key_of(work.key) for work in works.values())
        for player in works:
            # A round may have become void after some players got its assignment and before the
            # others did. Only the greatest key came to all.
            while key_of(works[player].key) < greatest:
                works[player] = await _assignment(player)
        # Every key is kept: checks of rule 1 compare with all that came before.
        self.keys.append(("a round", greatest))
        ranked = sorted(works.items(), key=lambda each: each[1].rank)
        return AssignedRound(greatest, dict(ranked))

    async def void(self, round_: AssignedRound) -> AssignedRound:
        """A member says that it lost its data stream; the next round."""
        await self.fault(round_, round_.players[-1], pb.FAULT_KIND_DATA_STREAM_LOST)
        return await self.again(round_.players)

    async def again(self, players: Sequence[Player]) -> AssignedRound:
        """The round after a void one: everybody's data streams are new, as they must be."""
        for player in players:
            await player.close_bulk()
            await player.ask()
        return await self.dealt(players)

    async def fault(
        self, round_: AssignedRound, player: Player, kind: pb.FaultKind, **fields: Any
    ) -> None:
        """A member reports what it saw."""
        key = conversion.key_to_proto(round_.key)
        await player.say(fault=pb.Fault(key=key, kind=kind, message="conformance", **fields))

    async def all_ready(
        self, round_: AssignedRound, players: Iterable[Player] | None = None, **fields: Any
    ) -> None:
        """These members, or all, hold all averages; see `ready`."""
        for player in round_.players if players is None else players:
            await self.ready(round_, player, **fields)

    async def ready(self, round_: AssignedRound, player: Player, **fields: Any) -> None:
        """A member holds all averages; by default its weight is its samples, its loss 1.

        Worker `n` says that it is `n + 1` times slower than worker 0.
        """
        samples = round_.samples(player)
        work = round_.works[player]
        ready = pb.StepReady(
            key=conversion.key_to_proto(round_.key),
            loss_sum=float(samples),
            weight=samples,
            samples=samples,
            total_weight=round_.totals.get(player, float(work.batch.stop - work.batch.start)),
            world_size=len(round_.works),
            timings=pb.Timings(
                busy_s=samples * (player.worker + 1) * _SECONDS_PER_SAMPLE, computed=samples
            ),
        )
        if player.accepted.policy.gradient_norm:
            ready.gradient_norm = 1.0
        if self.target.plan.grain:
            ready.node_losses.extend(losses_of(work, self.target.plan.grain))
        for name, value in fields.items():
            ready.ClearField(name)
            ready.MergeFrom(pb.StepReady(**{name: value}))
        # Before it is sent: a record that is faster than this task must find the averages held.
        player.held = round_.key
        await player.say(step_ready=ready)

    async def committed(self, round_: AssignedRound) -> dict[Player, pb.StepCommitted]:
        """The StepCommitted of the round that each member receives."""
        return {player: await self.record_of(player, round_) for player in round_.works}

    async def record_of(self, player: Player, round_: AssignedRound) -> pb.StepCommitted:
        """The StepCommitted of the round that one member receives."""
        committed: pb.StepCommitted = await player.train.take(
            "step_committed",
            lambda each: each.record.step > 0,
            what=f"StepCommitted of {round_.key}",
        )
        self.keys.append(("a record", key_of(committed.record.key)))
        return committed

    async def finish(self, round_: AssignedRound, **fields: Any) -> dict[Player, pb.StepCommitted]:
        """Takes an assigned round through its exchange to its record."""
        await round_.exchange()
        await self.all_ready(round_, **fields)
        return await self.committed(round_)

    async def not_committed(
        self, round_: AssignedRound, players: Sequence[Player]
    ) -> AssignedRound:
        """The next round, which shows that a void one became no record nevertheless."""
        for player in players:
            await player.close_bulk()
            await player.ask()
        for player in players:
            message = await player.train.first(_goes_on, what="the next assignment")
            if message.HasField("step_committed"):
                key = key_of(message.step_committed.record.key)
                raise Violation(
                    f"no record of the void round {round_.key}", f"{key} at {player.name}"
                )
            # It was only looked at: `dealt` takes it.
            player.train.inbox.insert(0, message)
        following = await self.dealt(players)
        for player in players:
            if player in round_.works:
                parent = key_of(round_.works[player].parent)
                same("the next round's parent", parent, key_of(following.works[player].parent))
        return following

    async def quiet(self, case: str, players: Iterable[Player], *, because: str) -> None:
        """Demands that nothing of a case comes."""
        # A server that errs may still be about to: first time, then a round trip to each player.
        await asyncio.sleep(self.target.quiet_s)
        for player in players:
            await player.fence()
            if player.train.cases(case):
                raise Violation(f"no {case} at {player.name} while {because}", case)

    async def ask(self, players: Iterable[Player]) -> None:
        """These players ask for work."""
        for player in players:
            await player.ask()

    async def fence(self, players: Iterable[Player]) -> None:
        """Waits until everything that the server has sent to these players has arrived."""
        for player in players:
            await player.fence()

    async def all_take(self, case: str) -> dict[Player, Any]:
        """The next message of a case, as each player receives it."""
        return {player: await player.train.take(case) for player in self.players}

    async def status(self, run_id: str = "") -> pb.LineStatus:
        """The line's status, as GetStatus reports it."""
        answer = await self.call("GetStatus", pb.GetStatusRequest(run_id=run_id))
        status: pb.LineStatus = answer.status
        return status

    async def pull_cord(self) -> Any:
        """Stops the line as a person does; the evidence."""
        request = pb.PullCordRequest(reason="conformance", operator="conformance")
        return (await self.call("PullCord", request)).halt

    async def clear_halt(self, halt_id: int, answer: pb.HaltAnswer = pb.HALT_ANSWER_RETRY) -> None:
        """Answers a halt as a person does."""
        await self.call(
            "ClearHalt",
            pb.ClearHaltRequest(halt_id=halt_id, answer=answer, operator="conformance"),
        )

    async def refusal(self, method: str, request: Any) -> Status:
        """The status that an operator's call ends with; OK if it is answered."""
        try:
            await self._ask(method, request)
        except grpc.aio.AioRpcError as error:
            return status_of(error)
        return Status(grpc.StatusCode.OK)

    async def call(self, method: str, request: Any) -> Any:
        """An operator's call, which must be answered in time."""
        try:
            return await self._ask(method, request)
        except grpc.aio.AioRpcError as error:
            raise Violation(f"an answer to {method}", str(status_of(error))) from None

    async def _ask(self, method: str, request: Any) -> Any:
        ask = getattr(CoordinatorStub(self.players[0].control), method)
        shown = self.target.reach.metadata
        return await ask(request, timeout=self.target.patience_s, metadata=shown)


def _goes_on(message: pb.TrainResponse) -> bool:
    return message.WhichOneof("message") in ("shard_assignment", "step_committed")


async def _assignment(player: Player) -> pb.ShardAssignment:
    work: pb.ShardAssignment = await player.train.take("shard_assignment")
    return work


def _status_name(number: int) -> str:
    return pb.JoinStatus.Name(number) if number in pb.JoinStatus.values() else str(number)
