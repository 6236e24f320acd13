"""Parts of a model: what each reducer of the map averages, and what of it a call concerns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc

from andon.host.tls import TlsError
from andon.protocol.layout import Chunk, Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare, chunks_by_address
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.channels import tls_trouble
from andon_trainer.exchange.collector import OpenCall
from andon_trainer.exchange.star.bulk_stream import ReducerAccess

__all__ = ["ReducerAway", "WrongMap", "open_all", "open_call", "parts_of"]


class ReducerAway(grpc.RpcError):
    """A reducer can't be reached, or refuses; the text says which one and why."""


class WrongMap(ValueError):
    """A map of reducers that is not the whole model, each element once, cut between chunks."""


class _Reducer(Protocol):
    """A reducer of the map, to which a stream can be opened."""

    @property
    def address(self) -> str:
        """As in the map; empty: the coordinator's."""

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the stream.

        Raises:
            TlsError, grpc.RpcError, FrameError: it can't be opened.
        """


def parts_of(
    layout: Layout, chunk_elements: int, shares: Sequence[ReducerShare]
) -> dict[str, list[list[Chunk]]]:
    """The chunks of each block that each reducer has, by its address.

    Args:
        layout: the model.
        chunk_elements: the most elements of a chunk.
        shares: the map; empty, or without addresses: the coordinator's own reducer has it all.

    Raises:
        WrongMap: the shares are not the whole model, each element once, cut between chunks.
    """
    if any(share.address for share in shares):
        try:
            return chunks_by_address(layout, chunk_elements, shares)
        except ValueError as error:
            raise WrongMap(f"the coordinator's map is wrong: {error}") from None
    blocks = range(len(layout.blocks))
    return {"": [list(layout.chunks_of(block, chunk_elements)) for block in blocks]}


def open_call(
    assigned: Assigned, weight: float, call: Call, elements: Sequence[Sequence[int]]
) -> tuple[OpenCall, range | list[int]]:
    """A call that begins, and the numbers of the reducers that it concerns.

    `elements`: how many of each block each reducer averages.
    """
    concerned: range | list[int] = [
        number for number, of in enumerate(elements) if any(of[block] for block in call.blocks)
    ]
    if call.data is not None or not concerned:
        concerned = range(1)
    if call.data is not None:
        missing = call.data.size
    else:
        missing = sum(elements[each][block] for each in concerned for block in call.blocks)
    key, rank, size = assigned.key, assigned.rank, assigned.world_size
    begun = OpenCall(key, rank, size, weight, call, missing, zeros_missing=len(concerned))
    return begun, concerned


def open_all(
    reducers: Sequence[_Reducer], address: str, opening: OpenRound, access: ReducerAccess
) -> None:
    """Opens streams to all of `reducers` at once; `address` is the coordinator's.

    Raises:
        ReducerAway: one can't be reached, or refuses.
        ReducerUnfit: one can't carry the line's chunks.
    """
    # Each waits for its reducer's answer, so they wait together.
    with ThreadPoolExecutor(max(1, len(reducers)), thread_name_prefix="andon-open") as pool:
        opened = {
            each.address or address: pool.submit(each.open, each.address or address, opening)
            for each in reducers
        }
    # The end of the block above waited for all of them. So no lane is still being opened by a
    # thread of the pool when the training thread goes on, or hears of a failure.
    for at, future in opened.items():
        try:
            future.result()
        except (grpc.RpcError, TlsError, FrameError) as error:
            raise ReducerAway(f"no reducer at {at}: {_why(error, at, access)}") from error


def _why(error: grpc.RpcError | TlsError | FrameError, address: str, access: ReducerAccess) -> str:
    """Why a reducer's lane can't be opened."""
    if isinstance(error, FrameError):
        return str(error)
    trouble = tls_trouble(error, address, access.tls)
    if trouble or isinstance(error, TlsError):
        return trouble
    return f"{error.code().name.lower().replace('_', ' ')}, {error.details()}"
