"""The data path: how a worker's blocks reach the others, and how their mean comes back.

Theory of operation. The training thread calls an `Exchange`: it begins a round, submits blocks and
goes on with backward. Threads of the exchange send and receive meanwhile. They never call back.
They put the outcome of a round into the `Inbox`, which the training thread reads wherever it has
to wait.

All exchanges keep one contract: the mean is defined to the bit, a value that must not be averaged
stops the line, and AveragesComplete comes only when all averages are here.
"""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from andon.protocol.messages import OpenRound
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned, Event

__all__ = ["Exchange", "Inbox", "Traffic"]


_LOOKS_UP_S = 0.5
"""How long the training thread waits at a stretch.

A signal that came just before a wait began, or to another thread, does not end the wait, and
Python runs its handler only once the main thread goes on."""


class Inbox:
    """Events in the order in which they came. Any thread puts; the training thread alone takes.

    Events of an older control stream are dropped. A stream is never resumed (rule 5), so what an
    older one brought must not be taken for what the line says now.
    """

    def __init__(self) -> None:
        """An empty inbox."""
        # A SimpleQueue, since its `put` may be called from a signal handler at any moment.
        self._events: queue.SimpleQueue[tuple[Event, int | None]] = queue.SimpleQueue()
        self._stream: int | None = None

    def follow(self, stream: int) -> None:
        """Makes control stream `stream` the present one. Only for the thread that takes."""
        self._stream = stream

    def put(self, event: Event, stream: int | None = None) -> None:
        """Adds an event; never blocks. `stream` is the control stream that brought it, if any."""
        self._events.put((event, stream))

    def take(self, timeout_s: float | None = None) -> Event | None:
        """Returns the oldest event, or None if none comes within `timeout_s` (None: for ever)."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                event, stream = self._events.get(timeout=min(left_s, _LOOKS_UP_S))
            except queue.Empty:
                if left_s > _LOOKS_UP_S:
                    continue
                return None
            # Looked at here and not in `put`: the old stream's thread may still put when the
            # training thread already follows the next one.
            if stream is None or stream == self._stream:
                return event


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many bytes of chunks one worker sent and received, by the `path` of the metrics."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    """How often memory could not be shared with a reducer of this host."""

    @classmethod
    def over(cls, path: str, sent: int, received: int) -> Self:
        """The bytes that went over one path."""
        return cls(Counter({path: sent}), Counter({path: received}))

    def __add__(self, other: Traffic) -> Traffic:
        """The sum of both."""
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.fallbacks + other.fallbacks,
        )


class Exchange(Protocol):
    """One worker's exchanges, one after the other. Used by one thread.

    The outcome of each goes into the worker's inbox: AveragesComplete or ExchangeFailed.
    """

    @property
    def first_sent(self) -> float | None:
        """When the first block of the present exchange was sent, by time.perf_counter()."""

    @property
    def traffic(self) -> Traffic:
        """What was sent and received so far."""

    @property
    def averages(self) -> Sequence[Floats]:
        """The averages of the last exchange: float32, one vector a block, read-only.

        Valid until the worker reports the step as ready, or begins another exchange. After that
        other workers may go on, and the memory is written again.
        """

    @property
    def is_open(self) -> bool:
        """Whether it can carry a round, as far as this end knows."""

    @property
    def refused(self) -> bool:
        """Whether a block of the present exchange held a value that must not be sent."""

    def lend(self, block: int, area: int = 0) -> tuple[Floats, Bytes] | None:
        """Memory for a block's gradients, and the whole mapping that it is part of.

        They may be written there before they are sent. It stays valid whatever becomes of the
        exchange. None: there is none now.

        Args:
            block: its index in the layout.
            area: which of the worker's contributions it is for.
        """

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens whatever is not open.

        Args:
            address: the coordinator's. Its own reducer is there, unless the map says otherwise.
            opening: the first message of each stream.

        Raises:
            ReducerAway: a reducer can't be reached, or refuses.
            ReducerUnfit: a reducer takes no payload as large as a chunk.
            TlsError: the folder of certificates can't be used.
        """

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """Begins an exchange of an assignment's round, to which this worker gives `weight`.

        Without a `call` all blocks are exchanged. With one, the exchange is one of several in the
        round, and the averages of each are awaited before the next begins.
        """

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> None:
        """Checks and sends one block; `flat` must not change until the round is over.

        With `keeps_loss` each element of `flat` becomes what the encoding lost of it, at some
        moment before the averages are announced. If the round is void, threads of the exchange may
        still write there.

        If it holds a value that is not finite, or beyond the encoding, that is reported instead,
        and nothing more of this exchange is sent.
        """

    def submit_nodes(self, block: int, flats: Sequence[Floats]) -> None:
        """Checks and sends the sums of a block, one for each of the call's nodes; see `submit`."""

    def submit_data(self) -> None:
        """Sends the call's bytes to all; only for rank 0."""

    def abstain(self) -> None:
        """Gives nothing to the exchange; its averages still come."""

    def end(self) -> None:
        """Forgets the round, and drops whatever of it may still be on the way."""

    def close(self) -> None:
        """Ends all streams. The exchange can be opened again."""
