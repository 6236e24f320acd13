"""One call of the client, and the messages that the script sends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

__all__ = ["ClientCall", "Ending", "refusal"]

Ending = Any
"""A status for `abort_with_status`; None ends the call with OK."""


class ClientCall:
    """One call of the client: Train, Reduce, PutState or GetState."""

    def __init__(self, method: str, number: int, peer: str, address: str) -> None:
        """A call of `method`, the `number`-th, over the connection `peer`.

        `address` is that of the reducer that serves it; empty if it is the coordinator's process.
        """
        self.method = method
        self.number = number
        self.peer = peer
        self.address = address
        self.is_open = True
        self.ended_here = False
        """Whether the judge ended it, rather than the client."""
        self.lane: Callable[[bytes], None] | None = None
        """Sends a message on the stream's lane down, once there is one."""
        self.outgoing: asyncio.Queue[tuple[bytes | None, Ending]] = asyncio.Queue()

    def __str__(self) -> str:
        """A name for evidence, such as `Train 2`."""
        return " at ".join(filter(None, (f"{self.method} {self.number}", self.address)))

    def send(self, message: Any) -> None:
        """Sends a message, or raw bytes."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        if self.lane is not None:
            self.lane(data)
            return
        self.outgoing.put_nowait((data, None))

    def send_all(self, messages: Sequence[Any]) -> None:
        """Sends several messages in order."""
        for message in messages:
            self.send(message)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> None:
        """Ends the call, after all that was sent."""
        self.end_with(None if code is grpc.StatusCode.OK else _status(code, details, []))

    def end_with(self, ending: Ending) -> None:
        """Ends the call with a status that `refusal` made."""
        self.ended_here = True
        self.outgoing.put_nowait((None, ending))


def refusal(reason: str, details: str, **metadata: str) -> Ending:
    """A status FAILED_PRECONDITION, with an ErrorInfo that says what differs."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="andon", metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return _status(grpc.StatusCode.FAILED_PRECONDITION, details, [detail])


def _status(code: grpc.StatusCode, details: str, packed: list[any_pb2.Any]) -> Ending:
    number = code_pb2.Code.Value(code.name)
    return rpc_status.to_status(status_pb2.Status(code=number, message=details, details=packed))
