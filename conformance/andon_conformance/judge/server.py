"""The scripted server: accepts the client's calls, records them, and sends what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from andon.protocol.capabilities import LISTENING, REDUCER_CAPABILITIES
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.messages import OpenRound
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire.checksums import CAPABILITY as CHECKSUMS
from andon.wire.frames import FrameError, parse_requests
from andon_conformance.judge.lanes import LaneScript, ScriptedLanes
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import ENDED, OPENED, Transcript
from andon_conformance.lane_format import CAPABILITY

__all__ = ["GET", "MALFORMED", "PUT", "REDUCE", "TRAIN", "UNKNOWN", "ScriptedServer"]

TRAIN, REDUCE, PUT, GET = "Train", "Reduce", "PutState", "GetState"
MALFORMED = "malformed"
"""The kind of an event whose bytes are no valid message; `message` says why."""

UNKNOWN = bytes.fromhex("ba3e03") + b"new"
"""Field 999 of any message: a case, or a field, of a later version of the protocol."""
_RESET_WITHIN_S = 0.1

Parsed = Iterable[tuple[str, Any]]


class ScriptedServer:
    """Coordinator and reducer for one client, on a free port of loopback; or a reducer alone."""

    def __init__(
        self,
        transcript: Transcript,
        *,
        alone: bool = False,
        lanes: LaneScript = "none",
        checksums: bool = False,
    ) -> None:
        """Records events in `transcript`; with `alone` it serves a reducer without coordinator."""
        # A client that listens is not judged, so nothing here serves one.
        self._capabilities = tuple(each for each in REDUCER_CAPABILITIES if each != LISTENING)
        if checksums:
            self._capabilities += (CHECKSUMS,)
        self.lanes = ScriptedLanes(
            lanes,
            lambda kind, stream, message: transcript.add(kind, stream, message),
            lambda stream, data: self._take(stream, data, _reduce),
        )
        self._alone = alone
        self.address = ""
        """Its host:port, once it listens."""
        self._transcript = transcript
        self._calls = dict.fromkeys((TRAIN, REDUCE, PUT, GET), 0)
        self._streams: list[ClientCall] = []
        self.away = False
        """Whether it ends each Train call with UNAVAILABLE at once."""
        self.max_payload_bytes = 2**20
        """The limit that RoundOpened announces."""
        self.opened: bytes | None = None
        """The answer to OpenRound; None: RoundOpened."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ]
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "andon.v1.Coordinator", {TRAIN: self._method(TRAIN, _train)}
                ),
                grpc.method_handlers_generic_handler(
                    "andon.v1.Reducer",
                    {
                        REDUCE: self._method(REDUCE, _reduce),
                        PUT: self._method(PUT, _put),
                        GET: self._method(GET, _get),
                    },
                ),
            )
        )

    async def start(self) -> None:
        """Starts to serve."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self.lanes.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Ends all calls."""
        for stream in self._streams:
            stream.end(grpc.StatusCode.UNAVAILABLE, "the judge is done")
        await self.lanes.stop()
        await self._server.stop(0.1)

    def _method(self, method: str, read: Callable[[bytes], Parsed]) -> Any:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            self._calls[method] += 1
            stream = ClientCall(
                method, self._calls[method], context.peer(), self.address if self._alone else ""
            )
            self._streams.append(stream)
            self._transcript.add(OPENED, stream)
            # It is recorded first: the pace of a client's tries is judged.
            if self.away and method == TRAIN:
                stream.end(grpc.StatusCode.UNAVAILABLE, "the coordinator is not there yet")
            await self._serve(stream, requests, context, read)

        # Every method is served as a stream of raw bytes, so that invalid messages are seen too.
        return grpc.stream_stream_rpc_method_handler(serve)

    async def _serve(
        self, stream: ClientCall, requests: Any, context: Any, read: Callable[[bytes], Parsed]
    ) -> None:
        reader = asyncio.create_task(self._read(stream, requests, read))
        writer = asyncio.create_task(_write(stream, context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done() and stream.method in (TRAIN, REDUCE):
                # A client that cancels a call ends its sending half first: wait for the rest.
                await asyncio.wait({writer}, timeout=_RESET_WITHIN_S)
                self._gone(stream)
                stream.outgoing.put_nowait((None, None))
            ending = await writer
        except asyncio.CancelledError:
            writer.cancel()
            raise
        finally:
            reader.cancel()
            self._gone(stream)
        # Last, because nothing can be sent after a status.
        if ending is not None:
            await context.abort_with_status(ending)

    def _gone(self, stream: ClientCall) -> None:
        if stream.is_open:
            stream.is_open = False
            if not stream.ended_here:
                self._transcript.add(ENDED, stream)

    async def _read(
        self, stream: ClientCall, requests: Any, read: Callable[[bytes], Parsed]
    ) -> None:
        async for data in requests:
            self._take(stream, data, read)

    def _take(self, stream: ClientCall, data: bytes, read: Callable[[bytes], Parsed]) -> None:
        try:
            parsed = list(read(data))
        # No reason to end: a scenario judges what else the client does.
        except (DecodeError, FrameError) as error:
            parsed = [(MALFORMED, f"{len(data)} bytes: {error}")]
        for kind, message in parsed:
            self._transcript.add(kind, stream, message)
            if kind == "heartbeat":
                answer = pb.HeartbeatAnswer(sequence=message.sequence)
                stream.send(pb.TrainResponse(heartbeat_answer=answer))
            elif kind == "scalar_all_reduce":
                stream.send(pb.TrainResponse(scalar_all_reduce_result=_alone(message)))
            elif kind == "open_round":
                stream.send(self.opened or self._opened(stream, message))

    def _opened(self, stream: ClientCall, opening: OpenRound) -> reducer_pb2.ReduceResponse:
        opened = reducer_pb2.RoundOpened(
            capabilities=[each for each in self._capabilities if each in opening.capabilities],
            max_payload_bytes=self.max_payload_bytes,
        )
        offer = self.lanes.offer(stream, opening)
        if offer is not None:
            opened.tcp.CopyFrom(offer)
            opened.capabilities.append(CAPABILITY)
        return reducer_pb2.ReduceResponse(round_opened=opened)


def _alone(scalar_all_reduce: pb.ScalarAllReduce) -> pb.ScalarAllReduceResult:
    """The answer if no other worker takes part."""
    return pb.ScalarAllReduceResult(
        head=scalar_all_reduce.head,
        sequence=scalar_all_reduce.sequence,
        value=scalar_all_reduce.value,
        weight=scalar_all_reduce.weight,
        contributors=1,
    )


async def _write(stream: ClientCall, context: Any) -> Any:
    """Sends until the script ends the call; returns the status to end it with."""
    while True:
        data, ending = await stream.outgoing.get()
        if data is None:
            return ending
        await context.write(data)


def _train(data: bytes) -> Parsed:
    request = pb.TrainRequest.FromString(data)
    case = request.WhichOneof("message")
    if case is None:
        return [(MALFORMED, "a TrainRequest of no known case")]
    return [(case, getattr(request, case))]


_CASES = {
    "OpenRound": "open_round",
    "BlockGradient": "block_gradient",
    "Abstain": "abstain",
    "SharedMemoryMapped": "shared_memory_mapped",
}


def _reduce(data: bytes) -> Parsed:
    return [(_CASES[type(message).__name__], message) for message in parse_requests(data)]


def _put(data: bytes) -> Parsed:
    return [("put_state", reducer_pb2.PutStateRequest.FromString(data))]


def _get(data: bytes) -> Parsed:
    return [("get_state", reducer_pb2.GetStateRequest.FromString(data))]
