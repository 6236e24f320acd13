"""A scripted worker: it speaks the protocol and trains nothing.

The doctor's trial and the tests play workers with it. It needs asyncio, and no PyTorch.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from andon.host.tls import open_aio_channel
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import PROTOCOL_VERSION, STATE_PIECE_BYTES
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import layout_pb2, record_pb2, reducer_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.reducer_pb2_grpc import ReducerStub
from andon.wire import conversion, layouts

__all__ = ["ScriptedWorker", "Unexpected", "small_layout"]

_MADE_UP = "Internal error from Core"
"""How gRPC's asyncio client explains the status that it makes up."""


class Unexpected(Exception):
    """The line did something that the script does not expect: a sentence that says what."""


def small_layout(elements: int = 4) -> Layout:
    """A model of one block."""
    component = Component("weight", (elements,))
    return Layout((Block(BlockKind.OTHER, "block", (component,)),))


@dataclass
class ScriptedWorker:
    """One worker, driven call by call or by `work`, which runs until the line ends the run.

    By default it only claims things: `ready` reports averages that it never asked for, and `report`
    a state that nobody sent. With `open_reducer` it uses the data plane as well: `average`,
    `send_state` and `receive_state` move real bytes.
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
    """Extra arguments of its channel."""
    tls: Path | None = None
    """The folder of its certificates; None: no encryption."""
    asks: bool = True
    """Whether it asks for work by itself, as soon as it can."""
    head: Key | None = None
    step: int = 0
    accepted: pb.JoinAccepted = field(default_factory=pb.JoinAccepted)
    committed: list[pb.StepCommitted] = field(default_factory=list)
    assigned: list[pb.ShardAssignment] = field(default_factory=list)
    data_channel: grpc.aio.Channel | None = None
    """The connection to the reducer, while one is open."""

    async def join(self, **fields: Any) -> pb.JoinAccepted:
        """Joins on a new connection; `fields` replace fields of Join.

        Raises:
            grpc.aio.AioRpcError: the line refuses it.
            Unexpected: the answer is not JoinAccepted.
        """
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
        while True:
            self.channel = self._connect()
            stub: Any = CoordinatorStub(self.channel)
            self.call = stub.Train()
            try:
                await self.send(join=join)
                break
            except grpc.aio.AioRpcError as error:
                # The server ended the call before this was written: gRPC's asyncio client then
                # forgets the server's status and makes one up. So the server is asked again.
                if error.details() != _MADE_UP:
                    raise
                await self.channel.close()
        self.accepted = (await self.expect("join_accepted")).join_accepted
        return self.accepted

    async def send(self, **case: Any) -> None:
        """Sends one message, named by its case."""
        await self.call.write(pb.TrainRequest(**case))

    async def receive(self) -> pb.TrainResponse:
        """The next message, except answers to heartbeats.

        Raises:
            grpc.aio.AioRpcError: the stream ended with an error.
            Unexpected: the stream ended with OK.
        """
        while True:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                raise Unexpected("the coordinator ended the stream")
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
            halt = message.halt.evidence.message
            came = f"halt: {halt}" if halt else message.WhichOneof("message")
            raise Unexpected(f"the coordinator sent {came} in place of {case}")
        return message

    async def work(self) -> None:
        """Obeys every message until the run is over, then leaves as COMPLETE."""
        while await self.obey(await self.receive()):
            pass
        await self.leave()

    async def obey(self, message: pb.TrainResponse) -> bool:
        """Obeys one message; False if the run is over with it."""
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
        """Applies a record and asks for more work; False if the record is the run's last."""
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
        """Reports that a transfer succeeded; a receiver then asks for work."""
        self.head = conversion.key_from_proto(transfer.head)
        self.step = transfer.step
        await self.send(
            state_report=pb.StateReport(transfer_id=transfer.transfer_id, head=transfer.head)
        )
        if transfer.role == pb.TRANSFER_ROLE_RECEIVE and self.asks:
            await self.ask()

    async def ready(self, assignment: pb.ShardAssignment, **fields: Any) -> None:
        """Reports that it holds all averages; its weight is its sample count.

        `fields` replace fields of StepReady.
        """
        samples = _samples(assignment)
        ready = pb.StepReady(
            key=assignment.key,
            loss_sum=self.loss * samples,
            weight=samples,
            samples=samples,
            total_weight=assignment.batch.stop - assignment.batch.start,
            world_size=assignment.world_size,
        )
        for name, value in fields.items():
            ready.ClearField(name)  # MergeFrom alone could not set a field to 0.
            ready.MergeFrom(pb.StepReady(**{name: value}))
        await self.send(step_ready=ready)

    async def leave(self, reason: pb.LeaveReason = pb.LEAVE_REASON_COMPLETE) -> None:
        """Leaves with its digest, and ends its streams."""
        head = conversion.key_to_proto(self.head) or record_pb2.Key()
        digest = pb.WeightsDigest(head=head, sha256=self.digest)
        await self.send(leave=pb.Leave(reason=reason, final_step=self.step, digest=digest))
        await self._close_reducer()
        await self.call.done_writing()
        # The coordinator ends the stream once it has recorded the departure.
        await self.call.code()
        await self.channel.close()

    async def reset(self) -> None:
        """Breaks its streams, as the death of a process does."""
        self.call.cancel()
        await self._close_reducer()
        await self.channel.close()

    async def open_reducer(self) -> None:
        """Opens a stream to the reducer, on a connection of its own.

        Raises:
            grpc.aio.AioRpcError: the reducer refuses it.
            Unexpected: the answer is not RoundOpened.
        """
        shares = self.accepted.reducers
        self.data_channel = self._connect(shares[0].address if shares else "")
        self.reduce: Any = self._reducer().Reduce()
        opening = reducer_pb2.OpenRound(
            run_id=self.run_id,
            worker=self.accepted.worker,
            session_token=self.accepted.session_token,
        )
        await self.reduce.write(reducer_pb2.ReduceRequest(open_round=opening))
        await self._reduced("round_opened")

    async def average(
        self, assignment: pb.ShardAssignment, payload: bytes
    ) -> reducer_pb2.ReduceResponse:
        """Contributes float32 numbers as the whole of block 0; the reducer's answer.

        The block must fit into one chunk.

        Raises:
            grpc.aio.AioRpcError: the stream ended with an error.
            Unexpected: the answer is neither AveragedBlock nor BlockFault.
        """
        gradient = reducer_pb2.BlockGradient(
            key=assignment.key,
            operation=reducer_pb2.OPERATION_WEIGHTED_MEAN,
            rank=assignment.rank,
            world_size=assignment.world_size,
            element_count=len(payload) // 4,
            weight=float(_samples(assignment)),
            encoding=layout_pb2.ENCODING_FLOAT32,
            payload=payload,
        )
        await self.reduce.write(reducer_pb2.ReduceRequest(block_gradient=gradient))
        return await self._reduced("averaged_block", "block_fault")

    async def send_state(self, transfer: pb.StateTransfer, state: bytes) -> None:
        """Sends its state through the reducer, for the transfer's receiver."""
        call = self._reducer().PutState()
        first = reducer_pb2.PutStateRequest(
            **self._ticket(transfer), size_bytes=len(state), sha256=hashlib.sha256(state).digest()
        )
        await call.write(first)
        offset = (await call.read()).offset
        for start in range(offset, len(state), STATE_PIECE_BYTES):
            piece = state[start : start + STATE_PIECE_BYTES]
            await call.write(reducer_pb2.PutStateRequest(payload=piece))
        await call.done_writing()
        await call.code()

    async def receive_state(self, transfer: pb.StateTransfer) -> bytes:
        """The state that the transfer's sender sends through the reducer.

        Raises:
            Unexpected: its SHA-256 is not the one that was announced.
        """
        request = reducer_pb2.GetStateRequest(**self._ticket(transfer))
        call = self._reducer().GetState(request)
        announced = await call.read()
        pieces = []
        while (piece := await call.read()) is not grpc.aio.EOF:
            pieces.append(piece.payload)
        state = b"".join(pieces)
        if hashlib.sha256(state).digest() != announced.sha256:
            raise Unexpected("the state's SHA-256 is not the one that was announced")
        return state

    def _connect(self, address: str = "") -> grpc.aio.Channel:
        # Its own connection: channels with equal arguments would share one.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            *self.options,
        ]
        return open_aio_channel(address or self.address, options, self.tls)

    def _reducer(self) -> Any:
        """The reducer's stub. Any: the generated types know the synchronous calls only."""
        assert self.data_channel is not None, "open_reducer comes first"
        return ReducerStub(self.data_channel)

    async def _reduced(self, *wanted: str) -> reducer_pb2.ReduceResponse:
        answer = await self.reduce.read()
        if answer is grpc.aio.EOF:
            raise Unexpected("the reducer ended the stream")
        if answer.WhichOneof("message") not in wanted:
            raise Unexpected(f"the reducer sent {answer} in place of {' or '.join(wanted)}")
        response: reducer_pb2.ReduceResponse = answer
        return response

    async def _close_reducer(self) -> None:
        if self.data_channel is not None:
            self.reduce.cancel()
            await self.data_channel.close()
            self.data_channel = None

    def _ticket(self, transfer: pb.StateTransfer) -> dict[str, Any]:
        """What opens both ends of a transfer."""
        return {
            "run_id": self.run_id,
            "worker": self.accepted.worker,
            "session_token": self.accepted.session_token,
            "transfer_id": transfer.transfer_id,
            "head": transfer.head,
        }


def _samples(assignment: pb.ShardAssignment) -> int:
    return sum(part.stop - part.start for part in assignment.positions)
