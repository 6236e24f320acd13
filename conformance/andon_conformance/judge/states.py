"""States: recorded from one client, and sent to another one."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.records import Cursor, Key
from andon.v1 import reducer_pb2
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.streams import ClientCall

__all__ = ["StateSource", "give_state", "whole_state"]


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state that the client sent, and the digest of the weights in it."""

    state: bytes
    sha256: bytes
    head: Key
    step: int
    cursor: Cursor
    digest: bytes


async def whole_state(line: ScriptedLine, stream: ClientCall, size: int) -> bytes:
    """Waits for `size` bytes of the client's state; returns all bytes that it has sent."""

    def so_far() -> bytes:
        return b"".join(
            event.message.payload
            for event in line.transcript.events
            if event.kind == "put_state" and event.stream is stream
        )

    await line.transcript.wait(
        f"{size} bytes of state",
        lambda event: event.kind == "put_state" and len(so_far()) >= size,
    )
    return so_far()


def give_state(
    stream: ClientCall, origin: StateSource, *, data: bytes | None = None, offset: int = 0
) -> None:
    """Sends a recorded state in pieces, with its length and SHA-256, and ends the call.

    `data` is sent in place of the state, with the state's own length and SHA-256.
    """
    first = reducer_pb2.GetStateResponse(
        size_bytes=len(origin.state), sha256=origin.sha256, offset=offset
    )
    # The length and SHA-256 come first, without a piece.
    stream.send(first)
    stream.send_all(pieces(origin.state if data is None else data, offset))
    stream.end()


def pieces(data: bytes, start: int = 0) -> list[reducer_pb2.GetStateResponse]:
    """Bytes from `start` on, as pieces."""
    return [
        reducer_pb2.GetStateResponse(payload=data[at : at + STATE_PIECE_BYTES])
        for at in range(start, len(data), STATE_PIECE_BYTES)
    ]
