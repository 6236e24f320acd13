"""The scripted server's TCP lanes: offers them, checks the client's proofs, and carries frames."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from andon.protocol.messages import OpenRound
from andon.v1 import reducer_pb2
from andon_conformance.judge.streams import ClientCall
from andon_conformance.lane_format import (
    CAPABILITY,
    DIRECTION_AT,
    DOWN,
    NONCE_BYTES,
    PREAMBLE_BYTES,
    PROOF_BYTES,
    SHOWN_BYTES,
    UP,
    Proof,
    frame,
    read_frame,
)

__all__ = ["LANE", "LaneScript", "Preamble", "ScriptedLanes"]

LANE = "lane"
"""The kind of an event: a connection said a preamble. Its message is a `Preamble`."""
LaneScript = Literal["none", "right", "liar"]
"""Whether lanes are offered; a `liar` answers with a proof that it can't make."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """A preamble of the client, and whether its proof is right."""

    direction: int
    proven: bool


@dataclass(eq=False)
class _Offered:
    """An offer, and what came of it."""

    stream: ClientCall
    proof: Proof
    writers: dict[int, asyncio.StreamWriter] = field(default_factory=dict)

    def close(self) -> None:
        self.stream.lane = None
        for writer in self.writers.values():
            writer.close()


class ScriptedLanes:
    """A listener on a free port of loopback."""

    def __init__(
        self,
        script: LaneScript,
        record: Callable[[str, ClientCall, Any], None],
        parse: Callable[[ClientCall, bytes], None],
    ) -> None:
        """`record` takes events, and `parse` a message of the client as gRPC would carry it."""
        self._script = script
        self._record, self._parse = record, parse
        self._offers: dict[bytes, _Offered] = {}
        self._server: asyncio.Server | None = None
        self.frames: dict[ClientCall, int] = {}
        """How many frames came up on each stream's lane."""

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Closes all lanes."""
        for offered in self._offers.values():
            offered.close()
        if self._server is not None:
            self._server.close()

    def offer(self, stream: ClientCall, opening: OpenRound) -> reducer_pb2.TcpOffer | None:
        """What RoundOpened says; None if the client asked for no lanes, or none are offered."""
        if self._script == "none" or CAPABILITY not in opening.capabilities:
            return None
        assert self._server is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = Proof(
            run_id=opening.run_id,
            worker=opening.worker,
            session_token=opening.session_token,
            nonce=nonce,
        )
        self._offers[nonce[:SHOWN_BYTES]] = _Offered(stream, proof)
        port: int = self._server.sockets[0].getsockname()[1]
        return reducer_pb2.TcpOffer(port=port, nonce=nonce)

    def close_lanes_of(self, stream: ClientCall) -> None:
        """Breaks a stream's lanes."""
        for offered in self._offers.values():
            if offered.stream is stream:
                offered.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            preamble = await reader.readexactly(PREAMBLE_BYTES)
            offered = self._offers.get(preamble[DIRECTION_AT - SHOWN_BYTES : DIRECTION_AT])
            direction = preamble[DIRECTION_AT]
            if offered is not None:
                right = preamble == offered.proof.preamble(direction)
                # A right proof of no direction is none.
                proven = right and direction in (UP, DOWN)
                self._record(LANE, offered.stream, Preamble(direction, proven))
                if proven:
                    await self._carry(offered, direction, reader, writer)
        writer.close()

    async def _carry(
        self,
        offered: _Offered,
        direction: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self._script == "liar":
            writer.write(bytes(PROOF_BYTES))
            await reader.read(1)
            return
        # The answer comes before any frame: the client must not send to a listener that it can't
        # trust.
        writer.write(offered.proof.answer(direction))
        offered.writers[direction] = writer
        if direction == DOWN:
            offered.stream.lane = lambda data: writer.write(_framed(data))
            # Nothing comes up this lane; the read ends when the client closes it.
            await reader.read(1)
            return
        while True:
            head, payload = await read_frame(reader)
            self.frames[offered.stream] = self.frames.get(offered.stream, 0) + 1
            self._parse(offered.stream, _whole(head, payload))


def _whole(head: bytes, payload: bytes) -> bytes:
    """A frame's message as gRPC would carry it; bytes that are no message stay as they are."""
    message = reducer_pb2.ReduceRequest()
    try:
        message.ParseFromString(head)
    except ValueError:
        return head
    if message.WhichOneof("message") != "block_gradient" or message.block_gradient.payload:
        return head
    message.block_gradient.payload = payload
    return message.SerializeToString()


def _framed(data: bytes) -> bytes:
    """A message of gRPC as a frame."""
    message, payload = reducer_pb2.ReduceResponse.FromString(data), b""
    if message.WhichOneof("message") == "averaged_block":
        payload = message.averaged_block.payload
        message.averaged_block.ClearField("payload")
    return frame(message.SerializeToString(), payload)
