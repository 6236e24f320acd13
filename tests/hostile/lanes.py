"""A client of the TCP lane, written from docs/tcp-lane.md with plain sockets.

It shares nothing with Andon's own lane: the preamble, the answer and the frames are those of the
vectors. It keeps the protocol's rules only where a test asks for it.
"""

from __future__ import annotations

import hmac
import itertools
import queue
import socket
import ssl
import struct
from typing import Any, Self

import grpc

from andon.v1 import layout_pb2, record_pb2, reducer_pb2
from integration.strangers import REDUCE, Refused
from vectors.lanes import frame, preamble, proof

__all__ = ["DOWN", "UNANNOUNCED", "UP", "RawLane", "RawStream", "chunk", "next_key"]

UP, DOWN = 1, 2
UNANNOUNCED = "rehearsal"
"""A run without a coordinator: a reducer serves every key and transfer of it."""
PATIENCE_S = 20.0
_ROUNDS = itertools.count(1)


class RawLane:
    """One connection, which sends whatever it is told to."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection((host, port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            try:
                self.socket = context.wrap_socket(self.socket, server_hostname=host)
            except OSError:
                self.socket.close()
                raise

    def send(self, data: bytes) -> bool:
        """Sends all of it; False if the peer closed the connection, or did not read in time."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def read(self, size: int) -> bytes:
        """Reads `size` bytes, or less if the peer closes the connection.

        Raises:
            TimeoutError: it neither sends nor closes.
        """
        data = b""
        while len(data) < size:
            try:
                piece = self.socket.recv(size - len(data))
            except (ConnectionResetError, BrokenPipeError, ssl.SSLError):
                break
            if not piece:
                break
            data += piece
        return data

    def frame(self) -> tuple[reducer_pb2.ReduceResponse, bytes]:
        """Reads a frame: its head and its payload."""
        head_bytes, payload_bytes = struct.unpack("<II", self.read(8))
        head = reducer_pb2.ReduceResponse.FromString(self.read(head_bytes))
        return head, self.read(payload_bytes)

    def ended(self) -> bool:
        """Whether the peer closes the connection without a byte more.

        Raises:
            TimeoutError: it does not close it.
        """
        return self.read(1) == b""

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()


class RawStream:
    """A worker's Reduce call that asked for lanes, and what it was offered."""

    def __init__(
        self,
        address: str,
        run_id: str,
        worker: int,
        token: bytes,
        *capabilities: str,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.host = address.rpartition(":")[0]
        self.run_id, self.worker, self.token = run_id, worker, token
        self._connections: list[RawLane] = []
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = (
            grpc.insecure_channel(address, options=options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        )
        method: Any = self._channel.stream_stream(REDUCE)
        self.call: Any = method(iter(self._outgoing.get, None), timeout=3 * PATIENCE_S)
        opening = reducer_pb2.OpenRound(
            run_id=run_id,
            worker=worker,
            session_token=token,
            capabilities=capabilities or ("tcp.v1",),
        )
        self.say(reducer_pb2.ReduceRequest(open_round=opening))
        self.opened = reducer_pb2.ReduceResponse.FromString(next(self.call)).round_opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.hang_up()

    @property
    def nonce(self) -> bytes:
        """The nonce of the offer."""
        return bytes(self.opened.tcp.nonce)

    def say(self, message: reducer_pb2.ReduceRequest) -> None:
        """Sends a message over gRPC."""
        self._outgoing.put(message.SerializeToString())

    def half_close(self) -> None:
        """Sends no more over gRPC."""
        self._outgoing.put(None)

    def connect(self, context: ssl.SSLContext | None = None) -> RawLane:
        """A connection to the port of the offer, which has said nothing yet."""
        lane = RawLane(self.host, self.opened.tcp.port, context)
        self._connections.append(lane)
        return lane

    def preamble(self, direction: int, **other: Any) -> bytes:
        """The preamble that proves this stream's worker; `other` replaces what it is made of."""
        return preamble(
            other.get("key", self.token),
            other.get("nonce", self.nonce),
            direction,
            other.get("run_id", self.run_id),
            other.get("worker", self.worker),
            index=other.get("index", 0),
        )

    def lane(
        self, direction: int, context: ssl.SSLContext | None = None, *, index: int = 0
    ) -> RawLane:
        """A proven lane, or one of its further connections.

        Raises:
            AssertionError: the listener's answer is wrong, or there is none.
        """
        lane = self.connect(context)
        lane.send(self.preamble(direction, index=index))
        answer = lane.read(32)
        given = self.token, self.nonce, direction, self.run_id, self.worker
        right = proof("server", *given, index=index)
        assert hmac.compare_digest(answer, right), f"the listener answers {answer.hex()!r}"
        return lane

    def lanes(self, context: ssl.SSLContext | None = None) -> tuple[RawLane, RawLane]:
        """Both lanes, up and down."""
        return self.lane(UP, context), self.lane(DOWN, context)

    def end(self) -> Refused:
        """Reads the call to its end, and returns how it ended."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return Refused.of(error)
        return Refused(grpc.StatusCode.OK, "")

    def close(self) -> None:
        """Cancels the call; what it connected stays as it is."""
        self._outgoing.put(None)
        self.call.cancel()
        self._channel.close()

    def hang_up(self) -> None:
        """Closes every connection that it made."""
        for each in self._connections:
            each.close()


def next_key() -> record_pb2.Key:
    """A key above all before: each begins a round of its own."""
    return record_pb2.Key(term=1, round=next(_ROUNDS))


def chunk(payload: bytes, **fields: Any) -> bytes:
    """A frame with a gradient of a roster of one; `fields` replace some of its fields."""
    given: dict[str, Any] = {
        "key": next_key(),
        "operation": reducer_pb2.OPERATION_WEIGHTED_MEAN,
        "rank": 0,
        "world_size": 1,
        "block": 0,
        "element_offset": 0,
        "element_count": len(payload) // 4,
        "weight": 1.0,
        "encoding": layout_pb2.ENCODING_FLOAT32,
    }
    given.update(fields)
    head = reducer_pb2.ReduceRequest(block_gradient=reducer_pb2.BlockGradient(**given))
    return frame(head.SerializeToString(), payload)
