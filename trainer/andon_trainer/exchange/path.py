"""The data path: how a worker's blocks reach the others, and their mean comes back.

All paths keep one contract: the mean is defined to the bit, a value that must not be averaged stops
the line, and a round's averages are told of only when all of them are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from andon.protocol.messages import OpenRound
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.traffic import Traffic

__all__ = ["Exchange", "Lender", "lent_by"]


class Exchange(Protocol):
    """One worker's exchanges, one after the other. Used by one thread.

    What comes of them is put into the worker's inbox: AveragesComplete or ExchangeFailed.
    """

    @property
    def first_sent(self) -> float | None:
        """When the round's first block was sent, by time.perf_counter()."""

    @property
    def traffic(self) -> Traffic:
        """What was sent and received so far."""

    @property
    def averages(self) -> Sequence[Floats]:
        """Float32, one vector a block, to be read alone; those of the last exchange.

        Valid until the worker says that it is ready, or begins another: then others may go on.
        """

    @property
    def is_open(self) -> bool:
        """Whether it can carry a round, as far as this end knows."""

    @property
    def refused(self) -> bool:
        """Whether a block of the present exchange held a value that can't be sent."""

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens it, in place of what was open.

        Args:
            address: where the reducer is, or the coordinator's if a map says where they are.
            opening: the first message of each stream.

        Raises:
            grpc.RpcError: the other side can't be reached, or refuses.
            FrameError: its answer can't be read.
            ReducerUnfit: it takes no payload as large as a chunk.
        """

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """Starts an exchange of an assignment's round, to which this worker gives `weight`.

        The exchange is all blocks, or `call`: one of several, each awaited before the next.
        """

    def submit(self, block: int, flat: Floats) -> None:
        """Sends one block, checked; `flat` must stay as it is until the round is over.

        A value that is not finite, or beyond the encoding, is reported in place of the block, and
        nothing of this round is sent after it.
        """

    def submit_data(self) -> None:
        """Sends the call's bytes to all; rank 0 alone does."""

    def abstain(self) -> None:
        """Gives nothing to the round, and still gets its averages."""

    def end(self) -> None:
        """Forgets the round, and whatever of it may still be on the way."""

    def close(self) -> None:
        """Ends it."""


@runtime_checkable
class Lender(Protocol):
    """An exchange with memory of its own, in which gradients may be laid before they are sent."""

    def lend(self, block: int) -> tuple[Floats, Bytes] | None:
        """Where a block's gradients may lie, and the whole memory of which that is a part.

        What was lent stays as it is whatever becomes of the exchange. None: it has none now.
        """


def lent_by(exchange: Exchange, block: int) -> tuple[Floats, Bytes] | None:
    """What an exchange lends for a block, if it lends."""
    return exchange.lend(block) if isinstance(exchange, Lender) else None
