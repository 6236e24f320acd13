"""A scripted worker: it speaks the control protocol and trains nothing."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion, layouts

__all__ = ["ScriptedWorker", "Unexpected", "small_layout"]


class Unexpected(Exception):
    """The coordinator said something else than the script expects."""


def small_layout(elements: int = 4) -> Layout:
    """A model of one block."""
    component = Component("weight", (elements,))
    return Layout((Block(BlockKind.OTHER, "block", (component,)),))


@dataclass
class ScriptedWorker:
    """One worker, driven by hand or, by `work`, as a script that ends when the line says so.

    It claims to hold averages that it never asked for, and to have received state that nobody sent.
    """

    address: str
    run_id: str
    plan: RunPlan
    slot: int | None = None
    layout: Layout = field(default_factory=small_layout)
    incarnation: int = field(default_factory=lambda: secrets.randbits(64))
    digest: bytes = bytes(32)
    """The digest of its weights, at any head."""
    loss: float = 1.0
    options: tuple[tuple[str, int], ...] = ()
    """More arguments of its channel."""
    asks: bool = True
    """Whether it asks for work by itself, once it can."""
    head: Key | None = None
    step: int = 0
    accepted: pb.JoinAccepted = field(default_factory=pb.JoinAccepted)
    committed: list[pb.StepCommitted] = field(default_factory=list)
    assigned: list[pb.ShardAssignment] = field(default_factory=list)

    async def join(self, **fields: Any) -> pb.JoinAccepted:
        """Opens a stream of its own connection and joins; `fields` replace those of Join.

        Raises:
            grpc.aio.AioRpcError: the line refuses it.
            Unexpected: the answer is no JoinAccepted.
        """
        options = (("grpc.use_local_subchannel_pool", 1), *self.options)
        self.channel = grpc.aio.insecure_channel(self.address, options=options)
        self.call: Any = CoordinatorStub(self.channel).Train()  # type: ignore[call-arg]  # aio calls need no iterator
        join = pb.Join(
            run_id=self.run_id,
            node_id="scripted",
            launch_slot=self.slot,
            incarnation=self.incarnation,
            backend="cpu",
            protocol_version=PROTOCOL_VERSION,
            layout=layouts.layout_to_proto(self.layout),
            plan=conversion.plan_to_proto(self.plan),
            head=conversion.key_to_proto(self.head),
            step=self.step,
        )
        join.MergeFrom(pb.Join(**fields))
        await self.send(join=join)
        self.accepted = (await self.expect("join_accepted")).join_accepted
        return self.accepted

    async def send(self, **case: Any) -> None:
        """Sends one message, named by its case."""
        await self.call.write(pb.TrainRequest(**case))

    async def receive(self) -> pb.TrainResponse:
        """The next message, answers to heartbeats left out.

        Raises:
            grpc.aio.AioRpcError: the stream ended with an error.
            Unexpected: the stream ended well.
        """
        while True:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                raise Unexpected("the stream ended")
            if message.WhichOneof("message") != "heartbeat_answer":
                response: pb.TrainResponse = message
                return response

    async def expect(self, case: str) -> pb.TrainResponse:
        """The next message, which must be of this case.

        Raises:
            Unexpected: it is not.
        """
        message = await self.receive()
        if message.WhichOneof("message") != case:
            raise Unexpected(f"{case} was expected, not {message}")
        return message

    async def work(self) -> None:
        """Does what the line says, until its run is over; leaves COMPLETE."""
        while await self.obey(await self.receive()):
            pass
        await self.leave()

    async def obey(self, message: pb.TrainResponse) -> bool:
        """Does what one message says; False if the loops end with it."""
        match message.WhichOneof("message"):
            case "state_transfer":
                await self.report(message.state_transfer)
            case "shard_assignment":
                self.assigned.append(message.shard_assignment)
                await self.ready(message.shard_assignment)
            case "step_committed":
                return await self.apply(message.step_committed)
            case "shutdown":
                return False
        return True

    async def apply(self, committed: pb.StepCommitted) -> bool:
        """Applies a record and asks for more work; False if the loops end after it."""
        self.committed.append(committed)
        self.head = conversion.key_from_proto(committed.record.key)
        self.step = committed.record.step
        if committed.stop_reason:
            return False
        if self.asks:
            await self.ask()
        return True

    async def ask(self) -> None:
        """Asks for work at its head."""
        await self.send(request_work=pb.RequestWork(head=conversion.key_to_proto(self.head)))

    async def report(self, transfer: pb.StateTransfer) -> None:
        """Says that a transfer is done; as its receiver it asks for work then."""
        self.head = conversion.key_from_proto(transfer.head)
        self.step = transfer.step
        await self.send(
            state_report=pb.StateReport(transfer_id=transfer.transfer_id, head=transfer.head)
        )
        if transfer.role == pb.TRANSFER_ROLE_RECEIVE and self.asks:
            await self.ask()

    async def ready(self, assignment: pb.ShardAssignment, **fields: Any) -> None:
        """Says that it holds all averages; its weight is its samples'. `fields` replace fields."""
        samples = sum(part.stop - part.start for part in assignment.positions)
        ready = pb.StepReady(
            key=assignment.key,
            loss_sum=self.loss * samples,
            weight=samples,
            samples=samples,
            total_weight=assignment.batch.stop - assignment.batch.start,
            world_size=assignment.world_size,
        )
        ready.MergeFrom(pb.StepReady(**fields))
        await self.send(step_ready=ready)

    async def leave(self, reason: pb.LeaveReason = pb.LEAVE_REASON_COMPLETE) -> None:
        """Leaves with its digest, and ends the stream."""
        head = conversion.key_to_proto(self.head) or record_pb2.Key()
        digest = pb.WeightsDigest(head=head, sha256=self.digest)
        await self.send(leave=pb.Leave(reason=reason, final_step=self.step, digest=digest))
        await self.call.done_writing()
        await self.call.code()
        await self.channel.close()

    async def reset(self) -> None:
        """Breaks the stream, as the death of a process does."""
        self.call.cancel()
        await self.channel.close()
