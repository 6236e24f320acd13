"""Trial worker: speaks the protocol for one step, alone on a line, and looks at every bit."""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from andon.host.tls import open_aio_channel
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.messages import AveragedBlock, BlockGradient, OpenRound, Response, RoundOpened
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion, layouts
from andon.wire.frames import FrameError, frame_request, parse_response

__all__ = ["Trial", "TrialFailed", "train_one_step", "trial_numbers"]

_REDUCE = "/andon.v1.Reducer/Reduce"
_ELEMENTS = 2**16
_SAMPLES = 4
_PLAN = RunPlan(global_batch=_SAMPLES, dataset_size=_SAMPLES, total_steps=1)


class TrialFailed(Exception):
    """The line did not do what the protocol says: a sentence of what it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one step came to."""

    step_s: float
    """From the assignment to the commit."""
    exchange_s: float
    """From the chunk sent to its average received."""
    payload_bytes: int


def trial_numbers() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A gradient of all sorts of finite numbers: signed zeros, the smallest and the largest."""
    special = np.array([0.0, -0.0, 1.0, -1.5, 1e-45, -1e-45], np.float32)
    largest = np.finfo(np.float32).max
    numbers = np.random.default_rng(7).standard_normal(_ELEMENTS).astype(np.float32)
    numbers[: special.size] = special
    numbers[special.size : special.size + 2] = [largest, -largest]
    return numbers


async def train_one_step(address: str, run_id: str, tls: Path | None = None) -> Trial:
    """Joins, takes one step through the reducer, and leaves with the run done.

    The mean of one contribution is that contribution, bit by bit.

    Raises:
        TrialFailed: the line did something else.
    """
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with (
        open_aio_channel(address, options, tls) as control,
        open_aio_channel(address, options, tls) as bulk,
    ):
        try:
            return await _Worker(run_id, control, bulk).train()
        except grpc.aio.AioRpcError as error:
            raise TrialFailed(
                f"a stream ended with {error.code().name}: {error.details()}"
            ) from error
        except FrameError as error:
            raise TrialFailed(f"the reducer sent no message of the protocol: {error}") from error


class _Worker:
    """One worker, from Join to Leave; see docs/protocol.md."""

    def __init__(self, run_id: str, control: grpc.aio.Channel, bulk: grpc.aio.Channel) -> None:
        self._run_id = run_id
        # Any: the generated stubs type the synchronous calls only.
        self._train: Any = CoordinatorStub(control).Train()  # type: ignore[call-arg]
        reduce: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = bulk.stream_stream(_REDUCE)
        self._reduce: Any = reduce()
        self._gradient = trial_numbers()
        self._weights = np.zeros_like(self._gradient)

    async def train(self) -> Trial:
        accepted = await self._join()
        await self._open(accepted)
        await self._record(0)
        await self._send(request_work=pb.RequestWork(head=self._head))
        work = (await self._next("shard_assignment")).shard_assignment
        began = time.perf_counter()
        average = await self._exchange(conversion.key_from_proto(work.key))
        exchanged = time.perf_counter()
        await self._send(
            step_ready=pb.StepReady(
                key=work.key,
                loss_sum=0.5 * _SAMPLES,
                weight=_SAMPLES,
                samples=_SAMPLES,
                total_weight=average.total_weight,
                world_size=average.world_size,
            )
        )
        await self._record(1)
        committed = time.perf_counter()
        self._weights -= np.frombuffer(average.payload, np.float32)
        await self._leave()
        return Trial(
            step_s=committed - began,
            exchange_s=exchanged - began,
            payload_bytes=self._gradient.nbytes,
        )

    async def _join(self) -> pb.JoinAccepted:
        part = Component("weight", (_ELEMENTS,))
        layout = Layout((Block(BlockKind.OTHER, "trial", (part,)),))
        await self._send(
            join=pb.Join(
                run_id=self._run_id,
                node_id=socket.gethostname(),
                launch_slot=0,
                incarnation=secrets.randbits(64),
                backend="cpu",
                protocol_version=PROTOCOL_VERSION,
                layout=layouts.layout_to_proto(layout),
                plan=conversion.plan_to_proto(_PLAN),
            )
        )
        return (await self._next("join_accepted")).join_accepted

    async def _open(self, accepted: pb.JoinAccepted) -> None:
        opening = OpenRound(self._run_id, accepted.worker, accepted.session_token)
        await self._reduce.write(frame_request(opening))
        answer = await self._answer()
        if not isinstance(answer, RoundOpened):
            raise TrialFailed(f"the reducer answered OpenRound with {type(answer).__name__}")

    async def _exchange(self, key: Key) -> AveragedBlock:
        sent = self._gradient.tobytes()
        await self._reduce.write(
            frame_request(
                BlockGradient(
                    key=key,
                    rank=0,
                    world_size=1,
                    block=0,
                    offset=0,
                    count=_ELEMENTS,
                    weight=float(_SAMPLES),
                    payload=memoryview(sent),
                )
            )
        )
        answer = await self._answer()
        if not isinstance(answer, AveragedBlock):
            raise TrialFailed(f"the reducer answered a block with {answer}")
        if bytes(answer.payload) != sent:
            raise TrialFailed("the mean of one contribution is not that contribution, bit by bit")
        return answer

    async def _record(self, step: int) -> None:
        """Takes the next record, which must be that of `step`."""
        record = (await self._next("step_committed")).step_committed.record
        if record.step != step:
            raise TrialFailed(f"step {record.step} was committed in place of step {step}")
        self._head = record.key

    async def _leave(self) -> None:
        digest = hashlib.sha256(self._weights.tobytes()).digest()
        await self._send(
            leave=pb.Leave(
                reason=pb.LEAVE_REASON_COMPLETE,
                final_step=1,
                digest=pb.WeightsDigest(head=self._head, sha256=digest),
            )
        )
        await self._reduce.done_writing()
        await self._train.done_writing()
        while await self._train.read() is not grpc.aio.EOF:
            pass

    async def _send(self, **message: object) -> None:
        await self._train.write(pb.TrainRequest(**message))  # type: ignore[arg-type]  # by name

    async def _next(self, wanted: str) -> pb.TrainResponse:
        """The next message down, which must be of the wanted case."""
        message = await self._train.read()
        if message is grpc.aio.EOF:
            raise TrialFailed(f"the coordinator ended the stream before {wanted}")
        case = message.WhichOneof("message")
        if case == "halt":
            raise TrialFailed(f"the line {conversion.evidence_from_proto(message.halt.evidence)}")
        if case != wanted:
            raise TrialFailed(f"the coordinator sent {case} in place of {wanted}")
        response: pb.TrainResponse = message
        return response

    async def _answer(self) -> Response:
        data = await self._reduce.read()
        if data is grpc.aio.EOF:
            raise TrialFailed("the reducer ended the stream")
        return parse_response(data)
