"""Players: the workers that the suite plays, each with its own connections."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from andon.protocol.capabilities import REDUCER_CAPABILITIES, SAME_BITS, WORKER_CAPABILITIES
from andon.protocol.layout import Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon.protocol.schedules import BALANCE_CAPABILITY
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion, layouts
from andon_conformance.reach import Reach
from andon_conformance.runner.checks import Violation
from andon_conformance.runner.talk import Status, Talk

__all__ = ["Player", "ServerUnderTest", "ended_stranger", "key_of", "refused_join"]

TRAIN = "/andon.v1.Coordinator/Train"
REDUCE = "/andon.v1.Reducer/Reduce"
_FENCES = 2**32
"""Heartbeats that a check sends count from here on; those that keep the lease, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """The server under test, and the model and plan that the players bring."""

    reach: Reach
    run_id: str
    layout: Layout
    plan: RunPlan
    patience_s: float
    """How long the server may take for any one answer."""
    quiet_s: float
    """How long nothing must come where nothing may."""


def key_of(message: Any) -> Key:
    """The key in a message from the server."""
    try:
        return conversion.key_from_proto(message)
    except ValueError as error:
        raise Violation("a key with a term", str(error)) from None


class Player:
    """One worker. A record moves its head as soon as the record arrives.

    Methods that wait raise `Violation`, as those of `Talk`.
    """

    def __init__(self, target: ServerUnderTest, slot: int | None) -> None:
        """A worker that has neither joined nor any weights of the line."""
        self.target = target
        self.slot = slot
        self.incarnation = secrets.randbits(64)
        self.head: Key | None = None
        self.cursor = Cursor(0, 0)
        self.step = 0
        self.held: Key | None = None
        self.greatest_term = 0
        self.accepted = pb.JoinAccepted()
        self.train: Talk[pb.TrainResponse]
        self.older: Talk[pb.TrainResponse] | None = None
        """The stream that the current one replaced."""
        self.bulk: Talk[reducer_pb2.ReduceResponse] | None = None
        """Its open data stream, if any."""
        self.reducer_can: frozenset[str] = frozenset()
        """The capabilities that its data stream was opened with."""
        self._bulks: list[Talk[reducer_pb2.ReduceResponse]] = []
        self.connections: list[asyncio.StreamWriter] = []
        """Of lanes; they are closed with the data streams."""
        self.control = target.reach.channel()
        self._data: grpc.aio.Channel | None = None
        self._on_line = False
        self._beats: asyncio.Task[None] | None = None
        self._fences = itertools.count(_FENCES)

    @property
    def name(self) -> str:
        """Its name in reports."""
        return "a stranger" if self.slot is None else f"worker {self.slot}"

    @property
    def worker(self) -> int:
        """The id that the server assigned."""
        return self.accepted.worker

    def join_message(self, **fields: Any) -> pb.TrainRequest:
        """A truthful Join; `fields` replace some of its fields."""
        join = pb.Join(
            run_id=self.target.run_id,
            node_id="conformance",
            launch_slot=self.slot,
            incarnation=self.incarnation,
            devices=[pb.Device(kind="cpu", name="conformance")],
            backend="cpu",
            capabilities=[BALANCE_CAPABILITY, *WORKER_CAPABILITIES, *self._of_grains],
            protocol_version=PROTOCOL_VERSION,
            layout=layouts.layout_to_proto(self.target.layout),
            plan=conversion.plan_to_proto(self.target.plan),
            head=conversion.key_to_proto(self.head),
            cursor=conversion.cursor_to_proto(self.cursor) if self.head else None,
            step=self.step,
            held_key=conversion.key_to_proto(self.held),
            greatest_term=self.greatest_term,
            token=self.target.reach.access.run_token,
        )
        if self._of_grains:
            # All players are one process.
            join.arithmetic.add(name="client", value="andon-conformance")
        for name, value in fields.items():
            join.ClearField(name)
            if value is not None:
                join.MergeFrom(pb.Join(**{name: value}))
        return pb.TrainRequest(join=join)

    @property
    def _of_grains(self) -> tuple[str, ...]:
        """What a worker of a line in grains must be able to do; nothing on others."""
        return (SAME_BITS,) if self.target.plan.grain else ()

    def open_train(self) -> Talk[pb.TrainResponse]:
        """Opens a control stream, without sending anything."""
        call = _call(self.control, TRAIN, pb.TrainResponse.FromString)
        return Talk(call, self.name, patience_s=self.target.patience_s, heard=self._heard)

    async def join(self, **fields: Any) -> pb.JoinAccepted:
        """Joins on a new stream, which replaces the previous one."""
        # The older stream stays open here: it is the server's to end.
        self.older = self.train if self._on_line else None
        self.train = self.open_train()
        self._on_line = True
        await self.train.send(self.join_message(**fields))
        accepted: pb.JoinAccepted = await self.train.take("join_accepted")
        self.accepted = accepted
        self.greatest_term = max(self.greatest_term, accepted.term)
        # Heartbeats begin with the answer: before it a stream may carry nothing but Join.
        if self._beats is not None:
            self._beats.cancel()
        self._beats = asyncio.create_task(self._beat(self.train, accepted.liveness.heartbeat_s))
        return accepted

    async def say(self, **message: Any) -> None:
        """Sends one message on the control stream; the argument's name is its case."""
        await self.train.send(pb.TrainRequest(**message))

    async def ask(self) -> None:
        """Asks for work at its head."""
        await self.say(request_work=pb.RequestWork(head=conversion.key_to_proto(self.head)))

    async def fence(self) -> None:
        """Waits until everything that the server has sent so far has arrived."""
        sequence = next(self._fences)
        await self.say(heartbeat=pb.Heartbeat(sequence=sequence, activity=pb.ACTIVITY_IDLE))
        await self.train.take(
            "heartbeat_answer",
            lambda answer: answer.sequence == sequence,
            what="a heartbeat's answer",
        )

    async def leave(self, reason: pb.LeaveReason, digest: bytes = b"") -> None:
        """Leaves, and ends its control stream."""
        final = pb.WeightsDigest(head=conversion.key_to_proto(self.head), sha256=digest)
        await self.say(
            leave=pb.Leave(reason=reason, final_step=self.step, digest=final if digest else None)
        )
        # No heartbeat after Leave, which is the last message of a stream.
        self._quiet()
        await self.train.finish()

    async def vanish(self) -> None:
        """Dies: breaks every stream."""
        # Heartbeats first: one that is sent to a dying stream would only be noise in the report.
        self._quiet()
        await self.close_bulk()
        await self.train.cancel()

    async def come_anew(self) -> pb.JoinAccepted:
        """Dies, and joins again as a new process without any state."""
        await self.vanish()
        self.incarnation = secrets.randbits(64)
        self.head = self.held = None
        self.cursor, self.step, self.greatest_term = Cursor(0, 0), 0, 0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.target.patience_s
        # The server frees the slot when it sees that the old stream is gone, which may be after
        # this Join.
        while True:
            try:
                return await self.join()
            except Violation:
                ended = self.train.status
                held = ended is not None and ended.code is grpc.StatusCode.ALREADY_EXISTS
                if not held or loop.time() > deadline:
                    raise
            await asyncio.sleep(0.02)

    async def open_bulk(
        self,
        *,
        token: bytes | None = None,
        capabilities: Sequence[str] = (),
    ) -> Talk[reducer_pb2.ReduceResponse]:
        """Opens a data stream and sends OpenRound; the caller takes the answer."""
        talk = self.start_bulk()
        opening = reducer_pb2.OpenRound(
            run_id=self.target.run_id,
            worker=self.worker,
            session_token=self.accepted.session_token if token is None else token,
            capabilities=["unheard-of.v1", *REDUCER_CAPABILITIES, *capabilities],
        )
        await talk.send(reducer_pb2.ReduceRequest(open_round=opening))
        return talk

    def start_bulk(self) -> Talk[reducer_pb2.ReduceResponse]:
        """Opens a data stream, without sending anything."""
        call = _call(self.data_channel, REDUCE, reducer_pb2.ReduceResponse.FromString)
        talk: Talk[reducer_pb2.ReduceResponse] = Talk(
            call, f"{self.name}'s data stream", patience_s=self.target.patience_s
        )
        self._bulks.append(talk)
        return talk

    async def stream(self) -> Talk[reducer_pb2.ReduceResponse]:
        """Its data stream; opens one if there is none."""
        # A server may end a stream between two rounds, and the next round needs one.
        if self.bulk is None or self.bulk.status is not None:
            self.bulk = await self.open_bulk()
            opened = await self.bulk.take("round_opened")
            self.reducer_can = frozenset(opened.capabilities)
        return self.bulk

    async def close_bulk(self) -> None:
        """Breaks its data streams."""
        self.bulk = None
        while self._bulks:
            await self._bulks.pop().cancel()
        while self.connections:
            writer = self.connections.pop()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @property
    def data_channel(self) -> grpc.aio.Channel:
        """The connection to the reducer: at its advertised address, or at the coordinator's."""
        if self._data is None:
            self._data = self.target.reach.channel(self.data_address)
        return self._data

    @property
    def data_address(self) -> str:
        """Where the reducer is, as host:port."""
        shares = self.accepted.reducers
        return (shares[0].address if shares else "") or self.target.reach.address

    async def close(self) -> None:
        """Ends its streams and connections."""
        self._quiet()
        await self.close_bulk()
        for talk in (self.older, self.train if self._on_line else None):
            if talk is not None:
                await talk.cancel()
        await self.control.close()
        if self._data is not None:
            await self._data.close()

    async def drop_older(self) -> None:
        """Breaks the stream that the current one replaced, in case the server has not."""
        if self.older is not None:
            await self.older.cancel()
            self.older = None

    def _quiet(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None

    async def _beat(self, talk: Talk[pb.TrainResponse], every_s: float) -> None:
        for sequence in itertools.count(1):
            beat = pb.Heartbeat(sequence=sequence, activity=pb.ACTIVITY_IDLE)
            try:
                await talk.send(pb.TrainRequest(heartbeat=beat))
            except Violation:
                return  # Whichever check waits on this stream reports it.
            await asyncio.sleep(max(every_s, 0.05))

    def _heard(self, message: pb.TrainResponse) -> bool:
        """Applies a record or a void to this worker; returns whether checks may see the message."""
        match message.WhichOneof("message"):
            # Only a fence waits for its answer; the others would fill the inbox.
            case "heartbeat_answer":
                return message.heartbeat_answer.sequence >= _FENCES
            case "step_committed":
                record = message.step_committed.record
                # The head moves before any check sees the record, so that every later request is
                # from it.
                self.head, self.held = Key(record.key.term, record.key.round), None
                self.cursor = Cursor(record.cursor.epoch, record.cursor.position)
                self.step = record.step
            case "shard_assignment":
                self.greatest_term = max(self.greatest_term, message.shard_assignment.key.term)
            case "halt" if message.halt.evidence.HasField("key"):
                self._void(message.halt.evidence.key)
            case "round_voided":
                self._void(message.round_voided.key)
        return True

    def _void(self, key: Any) -> None:
        if self.held is not None and (key.term, key.round) == (self.held.term, self.held.round):
            self.held = None


def _call(channel: grpc.aio.Channel, method: str, parse: Callable[[bytes], Message]) -> Any:
    """A call that sends messages, and raw bytes as they are."""
    return channel.stream_stream(
        method,
        request_serializer=lambda sent: (
            sent if isinstance(sent, bytes) else sent.SerializeToString()
        ),
        response_deserializer=parse,
    )()


async def refused_join(
    target: ServerUnderTest, *, slot: int | None = None, **fields: Any
) -> Status:
    """How the server ends a stranger's stream that sends a Join with these fields."""
    stranger = Player(target, slot)
    return await _ended(stranger, stranger.join_message(**fields))


async def ended_stranger(target: ServerUnderTest, message: pb.TrainRequest | bytes) -> Status:
    """How the server ends a stranger's stream whose first message is this."""
    return await _ended(Player(target, None), message)


async def _ended(stranger: Player, message: pb.TrainRequest | bytes) -> Status:
    try:
        talk = stranger.open_train()
        await talk.send(message)
        return await talk.end()
    finally:
        await stranger.close()
