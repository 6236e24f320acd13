"""PutState and GetState: the two ends of the relay.

After the first piece a PutStateRequest and a GetStateResponse are the same bytes, one `payload`
field. So pieces are passed on as they came, neither parsed nor copied. A receiver that was
interrupted says what it holds already, and the sender learns where to begin.

Two workers of one host need not send the bytes themselves: they lie in a file of the receiver's,
and pieces say how many are there. The reducer passes its name on, and never opens it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from andon.protocol.announcements import Session, TransferOpening
from andon.protocol.pieces import LEAST_PIECE_BYTES, next_piece_bytes
from andon.protocol.reasons import Reason
from andon.v1 import reducer_pb2
from andon.wire.fields import FrameError, read_fields
from andon_reducer.config import ReducerConfig
from andon_reducer.core.effects import CallRefusal, Direction, ReducerObserver
from andon_reducer.transport.admission import CallLimit, CallRefused
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.reduce_stream import Context
from andon_reducer.transport.relay import Header, Piece, Relay, RelayTransfer, WantedState

__all__ = ["StateServicer"]

_PAYLOAD = 15
_HEAD_BYTES = 16
"""More than the message around a payload has."""
_SHA256_BYTES = 32
_FOLDER_BYTES, _MOST_NAME = 16, 64
_Result = TypeVar("_Result")


class StateServicer:
    """Serves PutState and GetState."""

    def __init__(
        self,
        relay: Relay,
        observer: ReducerObserver,
        *,
        announced: Announced,
        config: ReducerConfig,
    ) -> None:
        """Serves the ends of `relay`; `config` says how long they may take."""
        self._config = config
        self._opening_s = config.opening_s
        self._ends = CallLimit(config.limits.max_streams_per_worker, "ends of state transfers")
        self._relay = relay
        self._observer = observer
        self._announced = announced
        self._closing = False

    async def put(self, context: Context) -> None:
        """One call of PutState.

        Raises:
            CallRefused: it ends with an error.
        """
        pieces = _pieces(context)
        try:
            async with asyncio.timeout(self._opening_s):
                data = await anext(pieces, None)
        except TimeoutError:
            text = f"the state's first piece did not come within {self._opening_s:g} s"
            raise CallRefused(Reason.INVALID_MESSAGE, text) from None
        if data is None:
            raise CallRefused(Reason.INVALID_MESSAGE, "a state has at least its first piece")
        first = _parse_put(data)
        if first.payload:
            raise CallRefused(Reason.INVALID_MESSAGE, "the first piece has no payload")
        if len(first.sha256) != _SHA256_BYTES:
            text = f"a SHA-256 is {_SHA256_BYTES} bytes, not {len(first.sha256)}"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        if first.size_bytes > sys.maxsize:
            text = f"a state of {first.size_bytes} bytes is more than any memory holds"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        if first.base_bytes > first.size_bytes:
            text = f"a base of {first.base_bytes} bytes, in a state of {first.size_bytes}"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        end = _CallersEnd()
        # Nothing is held for a caller before its token is verified: one small message was read.
        with self._admitted(first, end) as session:
            await self._announced.end_of(
                first.run_id, first.transfer_id, session, lambda transfer: transfer.donor
            )
            await self._put(first, context, pieces, end)

    async def _put(
        self,
        first: reducer_pb2.PutStateRequest,
        context: Context,
        pieces: AsyncIterator[bytes],
        end: _CallersEnd,
    ) -> None:
        header = Header(
            (first.head.term, first.head.round),
            first.size_bytes,
            first.sha256,
            first.base_bytes,
            first.base_sha256,
        )
        # The session may have been revoked while the call waited. From here to the entry nothing is
        # awaited.
        end.check()
        transfer = end.transfer = self._relay.send((first.run_id, first.transfer_id), header)
        sending = asyncio.create_task(self._send(transfer, context, pieces))
        # `sending` may wait for its client's next piece, and would not notice that the receiver is
        # gone. This task does, at once.
        lost = asyncio.create_task(transfer.lost())
        try:
            await asyncio.wait({sending, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._relay.leave(transfer, "sender")
            sending.cancel()
            lost.cancel()
            await asyncio.gather(sending, lost, return_exceptions=True)
        # Both may be done. If the state was sent, a loss after that is no failure.
        if not sending.cancelled():
            sending.result()
        elif not lost.cancelled():
            lost.result()

    async def get(self, data: bytes, context: Context) -> None:
        """One call of GetState.

        Raises:
            CallRefused: it ends with an error.
        """
        try:
            request = reducer_pb2.GetStateRequest.FromString(data)
        except DecodeError:
            raise CallRefused(Reason.INVALID_MESSAGE, "not a GetStateRequest") from None
        _require_file(request)
        end = _CallersEnd()
        with self._admitted(request, end) as session:
            await self._announced.end_of(
                request.run_id, request.transfer_id, session, lambda transfer: transfer.joiner
            )
            await self._get(request, context, end)

    @contextmanager
    def _admitted(
        self, first: reducer_pb2.PutStateRequest | reducer_pb2.GetStateRequest, end: _CallersEnd
    ) -> Iterator[Session]:
        """The session of a caller that shows its token; its call counts while this is entered.

        Raises:
            CallRefused: the token opens nothing, the caller has as many calls as it may, or the
                reducer is going away.
        """
        run_id, worker = first.run_id, first.worker
        with self._announced.session(run_id, worker, first.session_token, end.refuse) as session:
            if self._closing:
                raise CallRefused(Reason.SERVICE_LEAVING, "the reducer is going away")
            with self._ends.count(run_id, worker):
                yield session

    async def _get(
        self, request: reducer_pb2.GetStateRequest, context: Context, end: _CallersEnd
    ) -> None:
        head = request.head.term, request.head.round
        wanted = WantedState(
            head,
            request.offset,
            request.sha256,
            request.base_sha256,
            request.shared_folder,
            request.file_name,
        )
        # As in `_put`.
        end.check()
        transfer = self._relay.receive((request.run_id, request.transfer_id), wanted)
        end.transfer = transfer
        haste: _Haste | None = None
        try:
            header, coming = await transfer.both()
            response = reducer_pb2.GetStateResponse(
                size_bytes=header.size_bytes,
                sha256=header.sha256,
                offset=coming.start,
                base_bytes=header.size_bytes - coming.stop,
            )
            opening = self._announced.transfer(request.run_id, request.transfer_id)
            haste = _Haste(len(coming), self._config, opening)
            async with haste.limited():
                await self._in_time(context.write(response.SerializeToString()))
                while (piece := await self._piece_of(transfer)) is not None:
                    await self._pass_on(piece, context, haste)
            # Before `leave` below, which fails a transfer that is not done.
            transfer.finish()
        except TimeoutError:
            assert haste is not None, "the wait before it has its own refusal"
            text = haste.in_words
            transfer.fail(Reason.PEER_GONE, text)
            raise CallRefused(Reason.PEER_GONE, text) from None
        finally:
            self._relay.leave(transfer, "receiver")

    async def _pass_on(self, piece: Piece, context: Context, haste: _Haste) -> None:
        """Sends a piece to the receiver; in several, if that is slow."""
        for part in haste.parts_of(piece):
            began = time.monotonic()
            # Each wait is limited, and the whole transfer is, unless rounds run meanwhile: a
            # receiver could take one byte now and then for ever.
            await self._in_time(context.write(part))
            haste.passed(piece.file_bytes or len(part), time.monotonic() - began)
            self._observer.moved(Direction.DOWN, len(part))
            self._observer.relayed(piece.file_bytes or len(part))

    async def _piece_of(self, transfer: RelayTransfer) -> Piece | None:
        return await self._in_time(transfer.get())

    async def _in_time(self, step: Awaitable[_Result]) -> _Result:
        """Waits for one step of a transfer.

        Raises:
            TimeoutError: neither end moved for too long.
        """
        async with asyncio.timeout(self._config.state_stalled_s):
            return await step

    def close(self) -> None:
        """Ends all transfers as UNAVAILABLE."""
        self._closing = True
        self._relay.close()

    async def _send(
        self, transfer: RelayTransfer, context: Context, pieces: AsyncIterator[bytes]
    ) -> None:
        header, coming = await transfer.both()
        wanted = transfer.wanted
        assert wanted is not None, "both are there"
        answer = reducer_pb2.PutStateResponse(
            offset=coming.start,
            base_bytes=header.size_bytes - coming.stop,
            shared_folder=wanted.shared_folder,
            file_name=wanted.file_name,
        )
        await context.write(answer.SerializeToString())
        left = len(coming)
        async for data in pieces:
            state_bytes, piece = _read_piece(data)
            if piece.file_bytes and not wanted.file_name:
                text = "a piece lies in a file, and the receiver named none"
                raise CallRefused(Reason.INVALID_MESSAGE, text)
            left = _counted(left, state_bytes)
            self._observer.moved(Direction.UP, len(data))
            await transfer.put(piece)
        if left:
            raise CallRefused(Reason.INVALID_MESSAGE, f"the state ended {left} bytes early")
        # Only after the count: the receiver must not take a part for the whole.
        await transfer.put(None)
        # The call succeeds only once the receiver has everything: the sender reports a success.
        await transfer.taken()


class _CallersEnd:
    """A caller's end of a transfer, which ends if its session is revoked."""

    def __init__(self) -> None:
        self.transfer: RelayTransfer | None = None
        """None: the call has not entered it yet."""
        self._refusal: CallRefusal | None = None

    def refuse(self, refusal: CallRefusal) -> None:
        """Fails the transfer, at both ends."""
        self._refusal = refusal
        if self.transfer is not None:
            self.transfer.fail(refusal.reason, refusal.message)

    def check(self) -> None:
        """Refuses a call whose session was revoked while it waited."""
        if self._refusal is not None:
            raise CallRefused(self._refusal.reason, self._refusal.message)


class _Haste:
    """How long a transfer may take, and how far it has come."""

    def __init__(
        self, size_bytes: int, config: ReducerConfig, opening: TransferOpening | None
    ) -> None:
        """Begins now; `opening`: what the coordinator said of it, if it announces transfers."""
        self.moved = 0
        """Bytes that the receiver has taken."""
        self._size_bytes = size_bytes
        beside = opening is not None and opening.beside_training
        holds_up = opening is not None and opening.holds_up
        self._longest_s = None if beside else config.longest_transfer_s(size_bytes)
        self._look_after_s = config.state_hopeless_s if holds_up else None
        self._began = time.monotonic()
        self._piece_bytes = LEAST_PIECE_BYTES

    def parts_of(self, piece: Piece) -> Iterator[bytes]:
        """The messages in which a piece is passed on: as it came, if it is not too large."""
        if len(piece.message) <= self._piece_bytes + _HEAD_BYTES:
            yield piece.message
            return
        payload, begin = reducer_pb2.GetStateResponse.FromString(piece.message).payload, 0
        while begin < len(payload):
            # It may change with each message.
            end = begin + self._piece_bytes
            yield _piece(payload[begin:end]).message
            begin = end

    def passed(self, size_bytes: int, took_s: float) -> None:
        """The receiver has taken a message."""
        self.moved += size_bytes
        self._piece_bytes = next_piece_bytes(self._piece_bytes, took_s, self.moved)

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Limits what is awaited inside.

        Raises:
            TimeoutError: it takes too long, or is so slow that it would.
        """
        async with asyncio.timeout(self._longest_s) as limit:
            loop, look = asyncio.get_running_loop(), None
            if self._look_after_s is not None:
                look = loop.call_later(self._look_after_s, self._look, limit)
            try:
                yield
            finally:
                if look is not None:
                    look.cancel()

    def _look(self, limit: asyncio.Timeout) -> None:
        """Gives it up if it would take twice the time that it has: rates rise at first."""
        assert self._longest_s is not None
        assert self._look_after_s is not None
        if self.moved * self._longest_s * 2 < self._size_bytes * self._look_after_s:
            limit.reschedule(asyncio.get_running_loop().time())

    @property
    def in_words(self) -> str:
        """Why it was given up, for people."""
        seconds = time.monotonic() - self._began
        rate = self.moved / 1e6 / seconds
        text = (
            f"{self.moved / 1e6:.1f} of {self._size_bytes / 1e6:.1f} MB of state went to the "
            f"receiver in {seconds:.0f} s, {rate:.2f} MB/s"
        )
        if self._longest_s is None:
            return f"{text}, and then no more"
        return (
            f"{text}: too slow, the line goes on without it. All of it must come within "
            f"{self._longest_s:.0f} s, in which nobody trains"
        )


async def _pieces(context: Context) -> AsyncIterator[bytes]:
    while (data := await context.read()) is not grpc.aio.EOF:
        yield data


def _parse_put(data: bytes) -> reducer_pb2.PutStateRequest:
    try:
        return reducer_pb2.PutStateRequest.FromString(data)
    except DecodeError:
        raise CallRefused(Reason.INVALID_MESSAGE, "not a PutStateRequest") from None


def _require_file(request: reducer_pb2.GetStateRequest) -> None:
    """Checks what a receiver says of its file, before anybody hears of it.

    Raises:
        CallRefused: no file has such a name, or its folder is not said.
    """
    name, folder = request.file_name, request.shared_folder
    if not (name or folder):
        return
    if len(folder) != _FOLDER_BYTES or not 0 < len(name) <= _MOST_NAME or not name.isascii():
        text = f"a file needs a name of at most {_MOST_NAME} ASCII characters, and its folder"
        raise CallRefused(Reason.INVALID_MESSAGE, text)


def _read_piece(data: bytes) -> tuple[int, Piece]:
    """A later piece: how many bytes of state it has, and what to pass on."""
    try:
        fields = list(read_fields(memoryview(data)))
    except FrameError as error:
        raise CallRefused(Reason.INVALID_MESSAGE, str(error)) from None
    if len(fields) == 1 and fields[0][0] == _PAYLOAD and isinstance(fields[0][2], memoryview):
        return fields[0][2].nbytes, Piece(data)
    # Not the usual case: bytes in a file, or several fields, or an unknown one. The last of these
    # are readable, but not the same bytes in both directions.
    message = _parse_put(data)
    payload, in_file = message.payload, message.file_bytes
    if payload and in_file:
        text = "a piece has a payload, or says how many bytes lie in the file, and not both"
        raise CallRefused(Reason.INVALID_MESSAGE, text)
    if in_file:
        passed_on = reducer_pb2.GetStateResponse(file_bytes=in_file)
        return in_file, Piece(passed_on.SerializeToString(), in_file)
    return len(payload), _piece(payload)


def _piece(payload: bytes) -> Piece:
    return Piece(reducer_pb2.GetStateResponse(payload=payload).SerializeToString())


def _counted(left: int, size_bytes: int) -> int:
    if size_bytes > left:
        raise CallRefused(Reason.INVALID_MESSAGE, "the state is longer than its size_bytes")
    return left - size_bytes
