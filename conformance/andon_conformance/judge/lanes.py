"""The scripted server's TCP lanes: offers them, checks the client's proofs, and carries frames.

Written from docs/tcp-lane.md, without Andon's own lane.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from andon.protocol.messages import OpenRound
from andon.v1 import reducer_pb2
from andon_conformance.judge.streams import ClientCall

__all__ = ["CAPABILITY", "DOWN", "LANE", "UP", "LaneScript", "Opened", "ScriptedLanes"]

CAPABILITY = "tcp.v1"
LANE = "lane"
"""The kind of an event: a connection said a preamble. Its message is `Opened`."""
UP, DOWN = 1, 2
LaneScript = Literal["none", "right", "liar"]
"""Whether lanes are offered; a `liar` answers with a proof that it can't make."""

_NONCE_BYTES, _SHOWN_BYTES, _PREAMBLE_BYTES, _MAC_BYTES = 32, 16, 64, 32
_PREFIX = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Opened:
    """A preamble of the client."""

    direction: int
    proven: bool


@dataclass(eq=False)
class _Offered:
    """An offer, and what came of it."""

    stream: ClientCall
    opening: OpenRound
    nonce: bytes
    writers: dict[int, asyncio.StreamWriter] = field(default_factory=dict)


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
            _close(offered)
        if self._server is not None:
            self._server.close()

    def offer(self, stream: ClientCall, opening: OpenRound) -> reducer_pb2.TcpOffer | None:
        """What RoundOpened says; None if the client asked for no lanes, or none are offered."""
        if self._script == "none" or CAPABILITY not in opening.capabilities:
            return None
        assert self._server is not None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._offers[nonce[:_SHOWN_BYTES]] = _Offered(stream, opening, nonce)
        port: int = self._server.sockets[0].getsockname()[1]
        return reducer_pb2.TcpOffer(port=port, nonce=nonce)

    def close_lanes_of(self, stream: ClientCall) -> None:
        """Breaks a stream's lanes."""
        for offered in self._offers.values():
            if offered.stream is stream:
                _close(offered)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            preamble = await reader.readexactly(_PREAMBLE_BYTES)
            offered = self._offers.get(preamble[8 : 8 + _SHOWN_BYTES])
            direction = preamble[8 + _SHOWN_BYTES]
            if offered is not None:
                right = _preamble(offered, direction)
                proven = preamble == right and direction in (UP, DOWN)
                self._record(LANE, offered.stream, Opened(direction, proven))
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
            writer.write(bytes(_MAC_BYTES))
            await reader.read(1)
            return
        writer.write(_mac(b"andon tcp.v1 server\0", offered, direction))
        offered.writers[direction] = writer
        if direction == DOWN:
            offered.stream.lane = lambda data: writer.write(_framed(data))
            await reader.read(1)
            return
        while True:
            head_bytes, payload_bytes = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
            head = await reader.readexactly(head_bytes)
            payload = await reader.readexactly(payload_bytes)
            self.frames[offered.stream] = self.frames.get(offered.stream, 0) + 1
            self._parse(offered.stream, _whole(head, payload))


def _close(offered: _Offered) -> None:
    offered.stream.lane = None
    for writer in offered.writers.values():
        writer.close()


def _preamble(offered: _Offered, direction: int) -> bytes:
    mac = _mac(b"andon tcp.v1 client\0", offered, direction)
    return b"ANDONTCP" + offered.nonce[:_SHOWN_BYTES] + bytes([direction]) + bytes(7) + mac


def _mac(side: bytes, offered: _Offered, direction: int) -> bytes:
    run = offered.opening.run_id.encode()
    text = side + bytes([direction]) + offered.nonce
    text += struct.pack("<I", len(run)) + run + struct.pack("<I", offered.opening.worker)
    return hmac.new(offered.opening.session_token, text, hashlib.sha256).digest()


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
    head = message.SerializeToString()
    return _PREFIX.pack(len(head), len(payload)) + head + payload
