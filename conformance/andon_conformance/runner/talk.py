"""A call to the server under test, in which every wait has a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from andon_conformance.runner.checks import Violation, same

__all__ = ["Status", "Talk", "shown", "status_of"]

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended: its status code, and the ErrorInfo of domain `andon`, if any."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A short text for reports."""
        facts = ", ".join(f"{name} {text!r}" for name, text in sorted(self.metadata.items()))
        return f"{self.named} ({facts or self.message})" if facts or self.message else self.named

    @property
    def named(self) -> str:
        """Its code and reason, such as `NOT_FOUND WRONG_RUN`."""
        return f"{self.code.name} {self.reason}".strip()


def status_of(error: grpc.aio.AioRpcError) -> Status:
    """The status of an error. Without an ErrorInfo of domain `andon` its reason is empty."""
    # A status that can't be parsed counts as one without details.
    try:
        found = rpc_status.from_call(error)
    except ValueError:
        found = None
    for detail in found.details if found is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == "andon":
            return Status(error.code(), info.reason, error.details() or "", dict(info.metadata))
    return Status(error.code(), "", error.details() or "")


def shown(message: Message) -> str:
    """A message as one short line."""
    text = str(message).replace("\n", " ").strip() or type(message).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


class Talk(Generic[_M]):
    """A bidirectional call. Messages wait in `inbox` until a check takes them.

    Every method that waits raises `Violation` if the server does not do its part in time.
    """

    def __init__(
        self, call: Any, who: str, *, patience_s: float, heard: Callable[[_M], bool] | None = None
    ) -> None:
        """Starts to read. `heard` sees each message first, and says whether to keep it."""
        self.who = who
        self.inbox: list[_M] = []
        self.status: Status | None = None
        """How the call ended; None while it is open."""
        self._call = call
        self._heard = heard
        self._patience_s = patience_s
        self._stirred = asyncio.Event()
        self._writing = asyncio.Lock()
        """gRPC allows one write at a time on a call, and heartbeats come from their own task."""
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: Message | bytes) -> None:
        """Sends a message; does nothing if the call has ended, which checks find out themselves."""
        try:
            async with asyncio.timeout(self._patience_s), self._writing:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except TimeoutError:
            raise self._silence(f"{self.who} can send") from None

    async def take(
        self, case: str, where: Callable[[Any], bool] = lambda _: True, *, what: str = ""
    ) -> Any:
        """Takes the first message of a case that passes `where` out of the inbox."""
        message = await self.first(
            lambda each: each.WhichOneof("message") == case and where(getattr(each, case)),
            what=what or case,
        )
        return getattr(message, case)

    async def first(self, wanted: Callable[[_M], bool], *, what: str) -> _M:
        """As `take`, for messages of any case."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            # Out of order, because other messages may come in between; what is not wanted stays for
            # the next check.
            for place, message in enumerate(self.inbox):
                if wanted(message):
                    del self.inbox[place]
                    return message
            # After the inbox: what came before the end still counts.
            if self.status is not None:
                raise Violation(f"{what} at {self.who}", f"the end of its stream: {self.status}")
            # Between the look and this line nothing is awaited, so no message can be missed.
            self._stirred.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left):
                    await self._stirred.wait()
            except TimeoutError:
                raise self._silence(f"{what} at {self.who}") from None

    async def end(self) -> Status:
        """Waits until the server ends the call."""
        try:
            # The reader goes on if this wait ends: a later check may still need what comes.
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(self._reader)
        except TimeoutError:
            raise self._silence(f"the end of {self.who}'s stream") from None
        assert self.status is not None
        return self.status

    async def ends_with(self, code: str, what: str = "the status") -> None:
        """Demands that the server ends the call with this status code."""
        same(what, code, (await self.end()).code.name)

    async def refusal(self) -> Status:
        """Waits until the server ends the call, which it must do without an answer."""
        try:
            message = await self.first(lambda _: True, what="the end of the stream")
        except Violation:
            if self.status is None:
                raise
            return self.status
        raise Violation(f"the end of {self.who}'s stream", str(message.WhichOneof("message")))

    async def finish(self) -> Status:
        """Ends the sending half, then waits for the end of the call."""
        # An error here means that the call has ended already; `end` reports how.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._call.done_writing()
        return await self.end()

    async def cancel(self) -> None:
        """Breaks the call, as a dying process does."""
        self._call.cancel()
        await asyncio.wait({self._reader}, timeout=self._patience_s)

    def cases(self, case: str) -> list[Any]:
        """The messages of a case in the inbox."""
        found = (each for each in self.inbox if each.WhichOneof("message") == case)
        return [getattr(each, case) for each in found]

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                # `heard` first: a waiter that wakes sees the player as the message left it.
                if self._heard is None or self._heard(message):
                    self.inbox.append(message)
                self._stirred.set()
            self.status = Status(await self._call.code())
        except grpc.aio.AioRpcError as error:
            self.status = status_of(error)
        except asyncio.CancelledError:
            self.status = Status(grpc.StatusCode.CANCELLED)
        if self.status.code is not grpc.StatusCode.OK and not self.status.reason:
            self.status = await self._detailed(self.status)
        self._stirred.set()

    async def _detailed(self, status: Status) -> Status:
        """The status with its ErrorInfo, which the end of a read does not include."""
        try:
            trailers, text = await self._call.trailing_metadata(), await self._call.details()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return status
        error = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, text)
        return status_of(error)

    def _silence(self, expected: str) -> Violation:
        waiting = [each.WhichOneof("message") or "a message of no case" for each in self.inbox]
        others = f", only {', '.join(waiting[:6])}" if waiting else ""
        return Violation(expected, f"nothing of the kind within {self._patience_s:g} s{others}")
