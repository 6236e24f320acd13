"""What is heard: the averages of rounds that this worker attends, kept until its script needs them.

Theory of operation. While a worker learns, each reducer of the map sends it the averages of every
round, over a *listening stream* (docs/protocol-data.md). Nobody waits for it: so they come long
before the script has come to their step, and are kept as they came, encoded. Once the script begins
an exchange, it gets what was kept of it, and what still comes. So each of its steps is made of the
same bytes as that of the workers on the roster.

What was heard is of use only if nothing of it is missing. If a stream ends, or if more comes than
may wait here, one event says so, and this worker begins to learn anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from andon.host.memory import available_bytes
from andon.protocol.layout import Layout
from andon.protocol.messages import AveragedBlock, OpenRound, Response
from andon.protocol.records import Key
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Policy
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call, Floats, mean_of_gradients
from andon_trainer.core.events import Assigned, ListeningLost
from andon_trainer.exchange.collector import Collector, OpenCall
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.parts import open_all, open_call, parts_of
from andon_trainer.exchange.star.reducer_path import LanePart, WireLane

__all__ = ["HeardAverages", "HeardExchange", "room_for"]

_LEAST_ROOM_BYTES = 2**30
_MODELS = 16
"""So many times the model may wait, if there is memory for it."""
_PART_OF_MEMORY = 4
"""Not more than one part in so many of the memory that is available."""
_LEAST_BYTES_PER_S = 1e5
"""A link that is slower brings nobody in."""
_OVERHEAD_BYTES = 512
"""What keeping a message costs beside its payload, about."""
_LEFT_OUT = (
    "the others made more exchanges in a step than this worker's script: all workers make the same "
    "calls in the same order"
)


def room_for(layout: Layout, available: int | None) -> int:
    """How many bytes of averages may wait where so much memory is available; None: unknown."""
    wanted = max(_LEAST_ROOM_BYTES, _MODELS * 4 * layout.elements)
    return wanted if available is None else min(wanted, available // _PART_OF_MEMORY)


class HeardAverages(Collector):
    """A collector that keeps averages until a call asks for them. Any thread may give it some."""

    def __init__(
        self, layout: Layout, inbox: Inbox, *, stream: int, room_bytes: int | None = None
    ) -> None:
        """Has heard nothing yet.

        Args:
            layout: what is exchanged.
            inbox: where averages are announced, and that some will be missing.
            stream: the control stream on which this worker was asked to listen.
            room_bytes: how many bytes may wait here; None: what suits the model and this machine.
        """
        super().__init__(layout, inbox)
        self._stream = stream
        self._is_whole = True
        """Whether nothing is missing of what was heard."""
        room_bytes = room_for(layout, available_bytes()) if room_bytes is None else room_bytes
        self._room_bytes = room_bytes
        self._kept: dict[tuple[Key, int], list[AveragedBlock]] = {}
        """By round, and the number of the exchange in it."""
        self._kept_bytes = 0
        self._asked: tuple[Key, int] | None = None
        """The exchange that gets its averages at once."""
        self._begun: tuple[Key, int] | None = None
        """The last one that was begun."""
        self.clock: Callable[[], float] = time.monotonic
        self.heard_at = self.clock()
        """When something came that may be of the present exchange, or is older."""
        self._greatest: Key | None = None
        """Of older rounds nothing is kept any more."""
        self._keeping = threading.Lock()
        """Held for what is kept; never while an average is decoded."""

    def begin(self, open_call: OpenCall) -> None:
        """Collects for a call: what was kept of it, and what still comes."""
        name = open_call.key, open_call.call.sequence
        # Before the name: a thread that receives goes by that.
        super().begin(open_call)
        with self._keeping:
            self._asked = self._begun = name
            self.heard_at = self.clock()
            kept = self._take(name)
        try:
            for message in kept:
                super().receive(message)
        except FrameError as error:
            self.lost(str(error))

    def end(self) -> None:
        """Collects no more; what comes is kept again."""
        with self._keeping:
            self._asked = None
        super().end()

    def receive(self, message: Response, *, placed: bool = False) -> None:
        """Takes an average, for the present call or for a later one."""
        if not isinstance(message, AveragedBlock):
            return  # It is no member of any round: what went wrong in one is told by the record.
        if self._begun is None or (message.key, message.sequence) <= self._begun:
            self.heard_at = self.clock()
        if not placed and self._keeps(message):
            return
        super().receive(message, placed=placed)

    def lost(self, message: str) -> None:
        """A stream is gone, or what came is not what was sent."""
        with self._keeping:
            first, self._is_whole = self._is_whole, False
        if first:
            text = f"this worker can't learn on ({message})"
            self._inbox.put(ListeningLost(text), self._stream)

    def refuse_corrupt(self, message: AveragedBlock) -> None:
        """An average does not match its checksum, and nobody sends it again."""
        self.lost(
            f"an average at element {message.offset} of block {message.block} was changed on its "
            "way: the network, or the memory of a machine, is faulty"
        )

    def forget(self, head: Key) -> None:
        """Drops what is of rounds up to `head`: the state has them in it, or they are void."""
        with self._keeping:
            self._greatest = head
            past = [each for each in self._kept if each[0] <= head]
            for name in past:
                self._take(name)
        if any(map(self._was_left_out, past)):
            self.lost(_LEFT_OUT)

    def _was_left_out(self, name: tuple[Key, int]) -> bool:
        """Whether it is a later exchange than the script made in the step that it made up last."""
        begun = self._begun
        return begun is not None and begun[0] == name[0] == self._greatest and name > begun

    def _keeps(self, message: AveragedBlock) -> bool:
        """Keeps an average, unless it is the present call's."""
        name, trouble = (message.key, message.sequence), ""
        with self._keeping:
            if name == self._asked:
                return False
            if self._greatest is not None and message.key <= self._greatest:
                if not self._was_left_out(name):
                    return True
                trouble = _LEFT_OUT
            elif not self._keep(name, message):
                trouble = (
                    "this worker is too far behind: the averages that wait for it are more than "
                    f"the {self._room_bytes >> 20} MiB that it keeps"
                )
        if trouble:
            self.lost(trouble)
        return True

    def _keep(self, name: tuple[Key, int], message: AveragedBlock) -> bool:
        """Keeps a copy of an average; returns whether there is room for it."""
        # What it is a view of may be used for the next message.
        kept = replace(message, payload=memoryview(bytes(message.payload)))
        self._kept_bytes += _size_of(kept)
        if self._kept_bytes > self._room_bytes:
            return False
        self._kept.setdefault(name, []).append(kept)
        return True

    def _take(self, name: tuple[Key, int]) -> list[AveragedBlock]:
        """Takes what is kept of an exchange away."""
        kept = self._kept.pop(name, [])
        self._kept_bytes -= sum(map(_size_of, kept))
        return kept


def _size_of(message: AveragedBlock) -> int:
    return message.payload.nbytes + _OVERHEAD_BYTES


class _Source:
    """A reducer of the map, and the stream that averages come from."""

    def __init__(self, address: str, part: LanePart) -> None:
        self.address = address
        self.elements = [sum(chunk.count for chunk in chunks) for chunks in part.chunks]
        self.lane = WireLane(part)

    def open(self, address: str, opening: OpenRound) -> None:
        self.lane.open(address, opening)


class HeardExchange:
    """An `Exchange` that gives nothing, for rounds whose averages are heard."""

    first_sent: float | None = None
    refused = False

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        heard: HeardAverages,
        shares: Sequence[ReducerShare],
        access: ReducerAccess,
    ) -> None:
        """Opens nothing yet.

        Args:
            layout: what is exchanged.
            policy: how.
            heard: where averages wait.
            shares: the map; empty: the coordinator's own reducer has it all.
            access: how to reach the reducers.

        Raises:
            WrongMap: the shares are not the whole model, each element once, cut between chunks.
        """
        self.shares = tuple(shares)
        self._access = access
        self._heard = heard
        self._sources = [
            _Source(address, LanePart(part, policy, heard, access))
            for address, part in parts_of(layout, policy.chunk_elements, shares).items()
        ]
        encoding = policy.answer_encoding or policy.encoding
        chunk_bytes = encoding.payload_bytes(min(policy.chunk_elements, layout.elements))
        self.chunk_s = chunk_bytes / _LEAST_BYTES_PER_S
        """How long nothing may come on a slow link, since a chunk is on its way."""
        whole, mean = range(len(layout.blocks)), mean_of_gradients(policy)
        self._whole = Call(name="line.backward", blocks=whole, mean=mean)

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return sum((each.lane.traffic for each in self._sources), Traffic())

    @property
    def averages(self) -> Sequence[Floats]:
        """See `Exchange`."""
        return self._heard.averages

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return all(each.lane.is_open for each in self._sources)

    @property
    def heard_at(self) -> float:
        """When something came last that is not of a later exchange: a monotonic time."""
        return self._heard.heard_at

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens a listening stream at each reducer; see `Exchange`."""
        try:
            open_all(self._sources, address, replace(opening, listens=True), self._access)
        except BaseException:
            self.close()
            raise

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        elements = [each.elements for each in self._sources]
        begun, concerned = open_call(assigned, weight, call or self._whole, elements)
        for number in concerned:
            # The watch over TCP lanes goes by it: something is expected.
            self._sources[number].lane.begin(begun)
        self._heard.begin(begun)

    def lend(self, block: int, area: int = 0) -> None:
        """None: it gives nothing; see `Exchange`."""

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> None:
        """Gives nothing; see `Exchange`."""

    def submit_nodes(self, block: int, flats: Sequence[Floats]) -> None:
        """Gives nothing; see `Exchange`."""

    def submit_data(self) -> None:
        """Gives nothing; see `Exchange`."""

    def abstain(self) -> None:
        """Says nothing: nobody waits for it; see `Exchange`."""

    def end(self) -> None:
        """See `Exchange`; what comes of other rounds is kept as before."""
        self._heard.end()

    def forget(self, head: Key) -> None:
        """Drops what was heard of rounds up to `head`."""
        self._heard.forget(head)

    def close(self) -> None:
        """Ends the streams."""
        for each in self._sources:
            each.lane.close()
