"""Transfers: a state travels from one player to another through the reducer (section 11)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from andon.protocol.limits import STATE_PIECE_BYTES
from andon.protocol.records import Cursor
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import Violation, require, same
from andon_conformance.runner.player import Player, key_of
from andon_conformance.runner.talk import status_of

__all__ = ["STATE", "TransferEnds", "carry", "meet", "move", "report"]

STATE = bytes(range(251)) * (STATE_PIECE_BYTES // 251) + b"the rest of a state" * 1000
"""The players' state: longer than one piece."""

_GET = "/andon.v1.Reducer/GetState"
_PUT = "/andon.v1.Reducer/PutState"


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """A transfer, with the message that each end received."""

    joiner: Player
    donor: Player
    receive: pb.StateTransfer
    send: pb.StateTransfer


async def carry(players: Sequence[Player], joiner: Player) -> None:
    """Brings a player that is BEHIND to the line's head by the transfer that the line starts."""
    ends = await meet(players, joiner)
    arrived = await move(ends)
    require(arrived == STATE, f"{len(STATE)} bytes of state, unchanged", f"{len(arrived)} others")
    await report(ends)


async def meet(players: Sequence[Player], joiner: Player) -> TransferEnds:
    """The transfer to a player. The other players ask for work, so that one can be its sender."""
    for player in players:
        if player is not joiner and player.head is not None:
            await player.ask()
    # The receiver's message names the sender, which the suite can't know before.
    receive = await joiner.train.take("state_transfer")
    same("the joiner's role", pb.TRANSFER_ROLE_RECEIVE, receive.role)
    donor = _of_worker(players, receive.peer)
    send = await donor.train.take(
        "state_transfer", lambda each: each.transfer_id == receive.transfer_id
    )
    return TransferEnds(joiner, donor, receive, send)


def _of_worker(players: Sequence[Player], worker: int) -> Player:
    for player in players:
        if player.worker == worker:
            return player
    raise Violation("the id of a worker that is here", str(worker))


async def move(ends: TransferEnds) -> bytes:
    """Sends the state at one end and receives it at the other; returns what arrived."""
    patience_s = ends.joiner.target.patience_s
    try:
        async with asyncio.timeout(patience_s):
            # Both ends at once: the reducer only passes pieces on.
            _, arrived = await asyncio.gather(
                _put(ends.donor, ends.send), _get(ends.joiner, ends.receive)
            )
    except TimeoutError:
        raise Violation(
            "a state through the reducer", f"not all of it within {patience_s:g} s"
        ) from None
    except grpc.aio.AioRpcError as error:
        raise Violation("a state through the reducer", str(status_of(error))) from None
    return arrived


async def report(ends: TransferEnds) -> None:
    """Both ends report that they hold the head."""
    for player, transfer in ((ends.donor, ends.send), (ends.joiner, ends.receive)):
        player.head, player.step = key_of(transfer.head), transfer.step
        player.cursor = Cursor(transfer.cursor.epoch, transfer.cursor.position)
        player.held = None
        await player.say(
            state_report=pb.StateReport(transfer_id=transfer.transfer_id, head=transfer.head)
        )
    # The server must have the reports before anything else is asked.
    await ends.joiner.fence()


async def _put(donor: Player, transfer: pb.StateTransfer) -> None:
    call: Any = donor.data_channel.stream_stream(
        _PUT,
        request_serializer=reducer_pb2.PutStateRequest.SerializeToString,
        response_deserializer=reducer_pb2.PutStateResponse.FromString,
    )()
    first = reducer_pb2.PutStateRequest(
        run_id=donor.target.run_id,
        worker=donor.worker,
        session_token=donor.accepted.session_token,
        transfer_id=transfer.transfer_id,
        head=conversion.key_to_proto(key_of(transfer.head)),
        size_bytes=len(STATE),
        sha256=hashlib.sha256(STATE).digest(),
    )
    try:
        await call.write(first)
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise Violation("PutStateResponse", "the end of PutState")
        # From where the answer says: the receiver may have kept a part from a broken try.
        for start in range(answer.offset, len(STATE), STATE_PIECE_BYTES):
            piece = STATE[start : start + STATE_PIECE_BYTES]
            await call.write(reducer_pb2.PutStateRequest(payload=piece))
        await call.done_writing()
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise Violation("OK at the end of PutState", str(await call.details()))
    finally:
        call.cancel()


async def _get(joiner: Player, transfer: pb.StateTransfer) -> bytes:
    request = reducer_pb2.GetStateRequest(
        run_id=joiner.target.run_id,
        worker=joiner.worker,
        session_token=joiner.accepted.session_token,
        transfer_id=transfer.transfer_id,
        head=conversion.key_to_proto(key_of(transfer.head)),
    )
    call: Any = joiner.data_channel.unary_stream(
        _GET,
        request_serializer=reducer_pb2.GetStateRequest.SerializeToString,
        response_deserializer=reducer_pb2.GetStateResponse.FromString,
    )(request)
    try:
        first = await call.read()
        if first is grpc.aio.EOF:
            raise Violation("the first piece of a state", "the end of GetState")
        same("the state's length", len(STATE), first.size_bytes)
        same("the state's SHA-256", hashlib.sha256(STATE).hexdigest(), first.sha256.hex())
        require(not first.payload, "a first piece without payload", f"{len(first.payload)} bytes")
        pieces = []
        while (piece := await call.read()) is not grpc.aio.EOF:
            pieces.append(piece.payload)
        return b"".join(pieces)
    finally:
        call.cancel()
