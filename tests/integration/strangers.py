"""Peers that make mistakes: what they send to a line's port, and the answers that they get."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from andon.protocol.layout import Layout
from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon.wire.statuses import details_of

__all__ = ["REDUCE", "TRAIN", "Refused", "Stranger", "end_of", "resident_bytes", "talk"]

TRAIN = "/andon.v1.Coordinator/Train"
REDUCE = "/andon.v1.Reducer/Reduce"

_PATIENCE_S = 30


@dataclass(frozen=True)
class Refused:
    """The end of a call: the status, and its ErrorInfo."""

    code: grpc.StatusCode
    reason: str
    message: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: grpc.RpcError) -> Refused:
        """Reads an error; its reason is empty unless it has an ErrorInfo of Andon's domain."""
        call: Any = error
        told = details_of(error)
        return cls(call.code(), told.name, call.details(), dict(told.metadata))

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason}".strip()


def end_of(call: Any) -> Refused:
    """Reads a call to its end; returns how it ends."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return Refused.of(error)
    return Refused(grpc.StatusCode.OK, "")


@dataclass(frozen=True)
class Stranger:
    """A client with its own connection, which can send arbitrary messages to the line."""

    address: str
    run_id: str
    layout: Layout
    plan: RunPlan

    def join(self, **fields: Any) -> pb.TrainRequest:
        """A Join that the line would accept; `fields` replace some of its fields."""
        join = pb.Join(
            run_id=self.run_id,
            node_id="stranger",
            incarnation=99,
            protocol_version=PROTOCOL_VERSION,
            layout=layouts.layout_to_proto(self.layout),
            plan=conversion.plan_to_proto(self.plan),
        )
        for name, value in fields.items():
            join.ClearField(name)
            join.MergeFrom(pb.Join(**{name: value}))
        return pb.TrainRequest(join=join)

    def welcome(self, slot: int) -> pb.JoinAccepted:
        """Joins successfully, and leaves again."""
        with self.call(TRAIN) as (messages, responses):
            messages.put(self.join(launch_slot=slot).SerializeToString())
            answer = pb.TrainResponse.FromString(next(responses))
            responses.cancel()
        return answer.join_accepted

    def refused(self, method: str, *messages: bytes) -> Refused:
        """Sends messages on one stream; returns how the line ends it."""
        with self.call(method) as (outgoing, responses):
            for message in messages:
                outgoing.put(message)
            try:
                for _ in responses:
                    pass
            except grpc.RpcError as error:
                return Refused.of(error)
        raise AssertionError("the stream ended without an error")

    @contextmanager
    def call(self, method: str) -> Iterator[tuple[queue.SimpleQueue[bytes | None], Any]]:
        """A stream that sends raw bytes as messages."""
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            stream: Any = channel.stream_stream(method)
            try:
                yield outgoing, stream(iter(outgoing.get, None), timeout=_PATIENCE_S)
            finally:
                outgoing.put(None)


def talk(address: str, data: bytes) -> bytes:
    """Sends raw bytes to a port; returns what it answers until it closes the connection.

    Raises:
        TimeoutError: it does not close the connection.
    """
    host, _, port = address.rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            while piece := connection.recv(2**16):
                said += piece
        except (ConnectionResetError, BrokenPipeError):
            pass  # It closed the connection before it read all our bytes.
    return said


def resident_bytes(pid: int, *, most: bool = False) -> int:
    """A process's resident memory now, or its peak."""
    name = "VmHWM:" if most else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {name}")
