"""State transfers: a replica's whole state, in checked pieces, through the reducer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from andon import wire
from andon.limits import STATE_PIECE_BYTES
from andon.records import Key
from andon.v1 import reducer_pb2 as pb
from andon.v1.reducer_pb2_grpc import ReducerStub
from andon_trainer.exchange.control import open_channel

__all__ = ["StateCorrupt", "Ticket", "receive_state", "send_state"]


class StateCorrupt(ValueError):
    """The state that arrived is not the state that was sent; nothing was installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What either end shows the reducer."""

    address: str
    run_id: str
    worker: int
    session_token: bytes
    transfer_id: int
    head: Key


def send_state(ticket: Ticket, state: bytes) -> None:
    """Sends `state`; returns once the other end has taken it.

    Raises:
        grpc.RpcError: ABORTED if the other end is gone.
    """

    def pieces() -> Iterator[pb.PutStateRequest]:
        first = pb.PutStateRequest(
            run_id=ticket.run_id,
            worker=ticket.worker,
            session_token=ticket.session_token,
            transfer_id=ticket.transfer_id,
            head=wire.key_to_proto(ticket.head),
            size_bytes=len(state),
            sha256=hashlib.sha256(state).digest(),
        )
        yield first
        for start in range(0, len(state), STATE_PIECE_BYTES):
            yield pb.PutStateRequest(payload=state[start : start + STATE_PIECE_BYTES])

    with open_channel(ticket.address) as channel:
        ReducerStub(channel).PutState(pieces())


def receive_state(ticket: Ticket) -> bytes:
    """The state that the other end sends, verified.

    Raises:
        StateCorrupt: its length or its SHA-256 is not what was announced.
        grpc.RpcError: ABORTED if the other end is gone.
    """
    request = pb.GetStateRequest(
        run_id=ticket.run_id,
        worker=ticket.worker,
        session_token=ticket.session_token,
        transfer_id=ticket.transfer_id,
        head=wire.key_to_proto(ticket.head),
    )
    state = bytearray()
    announced: pb.GetStateResponse | None = None
    with open_channel(ticket.address) as channel:
        for piece in ReducerStub(channel).GetState(request):
            if announced is None:
                announced = piece
            state += piece.payload
            if len(state) > announced.size_bytes:
                raise StateCorrupt(f"more than the {announced.size_bytes} bytes announced came")
    if announced is None or len(state) != announced.size_bytes:
        raise StateCorrupt(f"{len(state)} bytes of state came, and then no more")
    if hashlib.sha256(state).digest() != announced.sha256:
        raise StateCorrupt("the state's SHA-256 is not what was announced")
    return bytes(state)
