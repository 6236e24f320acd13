"""A data stream of the suite's workers over TCP lanes."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from google.protobuf.message import Message

from andon.host.tls import client_context
from andon.v1 import reducer_pb2
from andon_conformance.lane_format import (
    CAPABILITY,
    DOWN,
    NONCE_BYTES,
    PROOF_BYTES,
    UP,
    Proof,
    frame,
    read_frame,
)
from andon_conformance.runner.checks import NotApplicable, Violation, require
from andon_conformance.runner.player import Player
from andon_conformance.runner.talk import Status, Talk

__all__ = ["LaneTalk", "Offer", "framed", "split"]


def split(message: reducer_pb2.ReduceRequest) -> tuple[bytes, bytes]:
    """Head and payload of a message's frame."""
    head, payload = reducer_pb2.ReduceRequest.FromString(message.SerializeToString()), b""
    if head.WhichOneof("message") == "block_gradient":
        payload = head.block_gradient.payload
        head.block_gradient.ClearField("payload")
    return head.SerializeToString(), payload


def framed(message: reducer_pb2.ReduceRequest) -> bytes:
    """A message as one frame."""
    return frame(*split(message))


class Offer:
    """A call of Reduce that offers lanes, before any is opened."""

    def __init__(
        self,
        player: Player,
        talk: Talk[reducer_pb2.ReduceResponse],
        opened: reducer_pb2.RoundOpened,
    ) -> None:
        """Takes a call whose RoundOpened was read."""
        self.player, self.talk, self.opened = player, talk, opened
        self.proof = Proof(
            run_id=player.accepted.run_id or player.target.run_id,
            worker=player.worker,
            session_token=player.accepted.session_token,
            nonce=opened.tcp.nonce,
        )
        self._tls = player.target.reach.access.tls_dir
        self._host = player.data_address.rpartition(":")[0].strip("[]")

    @classmethod
    async def of(cls, player: Player) -> Offer:
        """Opens a data stream that asks for lanes.

        Raises:
            NotApplicable: the server offers none.
        """
        talk = await player.open_bulk(capabilities=(CAPABILITY,))
        opened = await talk.take("round_opened")
        if CAPABILITY not in opened.capabilities:
            await talk.cancel()
            raise NotApplicable("the server offers no TCP lanes")
        good = opened.HasField("tcp") and 0 < opened.tcp.port < 2**16
        require(good, "an offer with a port", opened.tcp)
        size = len(opened.tcp.nonce)
        require(size == NONCE_BYTES, f"a nonce of {NONCE_BYTES} bytes", size)
        return cls(player, talk, opened)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has said nothing yet."""
        context: ssl.SSLContext | None = None if self._tls is None else client_context(self._tls)
        try:
            async with asyncio.timeout(self.player.target.patience_s):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self.opened.tcp.port,
                    ssl=context,
                    server_hostname=None if context is None else self._host,
                )
        except (OSError, TimeoutError) as error:
            where = f"{self._host}:{self.opened.tcp.port}"
            raise Violation(f"a listener at {where}, as offered", str(error)) from None
        self.player.connections.append(writer)
        return reader, writer

    async def said_to(self, preamble: bytes) -> bytes:
        """What the listener says to a preamble before it hangs up, or its whole answer."""
        reader, writer = await self.connect()
        answer = b""
        try:
            writer.write(preamble)
            async with asyncio.timeout(self.player.target.patience_s):
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    answer = await reader.read(PROOF_BYTES)
        except TimeoutError:
            raise Violation("an answer, or the connection's end", "neither in time") from None
        finally:
            writer.close()
        return answer

    async def lane(self, direction: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A lane on which both sides have proven themselves."""
        reader, writer = await self.connect()
        writer.write(self.proof.preamble(direction))
        answer = b""
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(self.player.target.patience_s):
                answer = await reader.readexactly(PROOF_BYTES)
        right = self.proof.answer(direction)
        require(answer == right, f"the answer {right.hex()}", answer.hex() or "nothing")
        return reader, writer

    async def lanes(self) -> LaneTalk:
        """The stream with both its lanes, as checks talk to any stream."""
        _, up = await self.lane(UP)
        down = await self.lane(DOWN)
        return LaneTalk(self.talk, up, down, patience_s=self.player.target.patience_s)


class LaneTalk(Talk[reducer_pb2.ReduceResponse]):
    """A stream whose messages travel on its lanes. It ends as its call does."""

    def __init__(
        self,
        call: Talk[reducer_pb2.ReduceResponse],
        up: asyncio.StreamWriter,
        down: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        patience_s: float,
    ) -> None:
        """Starts to read. The call itself is read only for its end."""
        self.call = call
        self._up = up
        self._down, self._down_writer = down
        super().__init__(None, f"the lanes of {call.who}", patience_s=patience_s)

    async def send(self, message: Message | bytes) -> None:
        """Sends a message as a frame, and bytes as they are."""
        data = framed(message) if isinstance(message, reducer_pb2.ReduceRequest) else message
        assert isinstance(data, bytes)
        try:
            async with asyncio.timeout(self._patience_s), self._writing:
                self._up.write(data)
                await self._up.drain()
        except ConnectionError:
            return
        except TimeoutError:
            raise self._silence(f"{self.who} can send") from None

    def close_lane(self, direction: int) -> None:
        """Closes one lane."""
        (self._up if direction == UP else self._down_writer).close()

    async def finish(self) -> Status:
        """Ends the sending half of the call, then waits for its end."""
        return await self.call.finish()

    async def cancel(self) -> None:
        """Breaks the call and its lanes, as a dying process does."""
        for direction in (UP, DOWN):
            self.close_lane(direction)
        await self.call.cancel()
        await asyncio.wait({self._reader}, timeout=self._patience_s)

    async def _read(self) -> None:
        try:
            while (message := await self._next()) is not None:
                self.inbox.append(message)
                self._stirred.set()
            # The lane down ends first: only the call says why.
            self.status = await self.call.end()
        finally:
            self._stirred.set()

    async def _next(self) -> reducer_pb2.ReduceResponse | None:
        """The next message on the lane down; None once that ends."""
        try:
            head, payload = await read_frame(self._down)
        except (asyncio.IncompleteReadError, OSError):
            return None
        message = reducer_pb2.ReduceResponse.FromString(head)
        if message.WhichOneof("message") == "averaged_block":
            message.averaged_block.payload = payload
        return message
