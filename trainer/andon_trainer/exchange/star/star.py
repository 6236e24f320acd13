"""The star: a worker's chunks go to one reducer, or to several that share the model.

Theory of operation. Each reducer of the map has a *lane*: a stream of its own, over a channel of
its own, that carries the chunks which the map gives to that reducer. What comes back on all lanes
goes to one collector, which announces once that everything is here. If one lane is lost, the round
is lost. Values are checked once a block, before any lane gets a chunk of it.

A call concerns the lanes that carry a chunk of its blocks. A worker that abstains says so on each
of these, and if all workers do, each reducer answers that there are zeros. Bytes from rank 0, and
barriers, have nothing to share out and go over the first lane of the map alone.

A lane goes through shared memory if the reducer is on this host and offers it, else over the wire:
over TCP lanes beside gRPC, or over gRPC alone.
The reducer is asked again each time that the lane is opened.

If a round ends without its averages, frames of it are left, here and on the way. The reducer may
have no room for them as long as a rank is missing, and whatever is sent after them would wait
behind them for ever. So the streams end with such a round, and the next round opens new ones
(docs/decisions/0012-a-void-round-takes-its-stream-with-it.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from andon.host.arena import SharedMemoryUnavailable
from andon.host.logs import LogEvent
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Bytes, Call, Floats, mean_of_gradients
from andon_trainer.core.events import Assigned
from andon_trainer.core.values import bad_value_of
from andon_trainer.exchange.channels import is_here
from andon_trainer.exchange.collector import Collector, OpenCall
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.star.bulk_stream import ReducerAccess
from andon_trainer.exchange.star.parts import ReducerAway, WrongMap, open_all, open_call, parts_of
from andon_trainer.exchange.star.reducer_path import Lane, LanePart, WireLane
from andon_trainer.exchange.star.shared import SharedLane, suits

__all__ = ["ReducerAway", "StarExchange", "WrongMap"]

log = logging.getLogger(__name__)


class _Reducer:
    """One reducer of the map, and the lane that leads to it."""

    def __init__(self, address: str, part: LanePart, layout: Layout, *, alone: bool) -> None:
        """Opens nothing yet; `alone`: it has the whole model."""
        self.address = address
        """As in the map; empty: the coordinator's."""
        self.elements = [sum(chunk.count for chunk in chunks) for chunks in part.chunks]
        """How many elements of each block it averages."""
        self._part = part
        self._alone = alone
        self._wire = WireLane(part)
        self._shared: SharedLane | None = None
        folder = part.access.shared_dir
        if folder is not None and layout.elements:
            self._shared = SharedLane(part, layout, folder, in_place=alone)
        self.lane: Lane = self._shared or self._wire
        """The present one."""
        self._said = ""
        self._shared_before = False
        """Whether memory was shared with it at least once."""
        self._fallbacks = 0

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the lane, through shared memory if the reducer offers it.

        Raises:
            TlsError, grpc.RpcError, FrameError, ReducerUnfit: see `WireLane.open`.
        """
        self.lane.close()
        why_not = ""
        if self._shared is not None:
            try:
                self._shared.open(address, opening)
                self.lane, self._shared_before = self._shared, True
                self._say(f"exchanging with the reducer at {address} over shared memory")
                return
            except SharedMemoryUnavailable as why:
                # Of another host, or for another encoding, nothing was to be expected. Containers
                # of one host have several addresses, so memory that was shared before counts too.
                if suits(self._part.policy) and (self._shared_before or is_here(address)):
                    self._fallbacks += 1
                why_not = f", not over shared memory: {why}"
        self._wire.open(address, opening)
        self.lane = self._wire
        self._say_wire(address, why_not)
        if self._alone:
            self._part.collector.read_from(None)

    def lend(self, block: int, area: int) -> tuple[Floats, Bytes] | None:
        """Memory for a block, if the lane has any."""
        return self.lane.lend(block, area) if isinstance(self.lane, SharedLane) else None

    @property
    def traffic(self) -> Traffic:
        """What went over both lanes so far."""
        traffic = self._wire.traffic
        if self._shared is None:
            return traffic
        shared = self._shared
        over = Traffic.over("shared-memory", shared.sent_bytes, shared.received_bytes)
        return traffic + over + Traffic(fallbacks=self._fallbacks)

    def _say_wire(self, address: str, why_not: str) -> None:
        """Logs how bytes travel, unless that is gRPC and nothing else was to be expected."""
        refused = self._wire.tcp_refused
        if refused:
            why_not += f", not over TCP: {refused}"
        if not why_not and not self._wire.uses_tcp:
            return  # Neither was offered.
        over = "TCP" if self._wire.uses_tcp else "gRPC"
        # Of several reducers, most are on other hosts anyway, where there is no shared memory.
        level = logging.WARNING if refused or (why_not and self._alone) else logging.INFO
        self._say(f"exchanging with the reducer at {address} over {over}{why_not}", level)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        """Logs which way it goes, if that changed."""
        if text != self._said:
            self._said = text
            log.log(level, LogEvent("path_chosen", text))


class StarExchange:
    """An `Exchange` with one or more reducers."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        shares: Sequence[ReducerShare] = (),
        access: ReducerAccess | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            layout: what is exchanged.
            policy: how.
            inbox: where the outcome of each exchange goes.
            shares: the map; empty: the coordinator's own reducer has it all.
            access: how to reach the reducers.

        Raises:
            WrongMap: the shares are not the whole model, each element once, cut between chunks.
        """
        self._policy = policy
        self._access = access or ReducerAccess()
        self._inbox = inbox
        self._collector = Collector(layout, inbox)
        parts = parts_of(layout, policy.chunk_elements, shares)
        self._reducers = [
            _Reducer(
                address,
                LanePart(part, policy, self._collector, self._access),
                layout,
                alone=len(parts) == 1,
            )
            for address, part in parts.items()
        ]
        whole, mean = range(len(layout.blocks)), mean_of_gradients(policy)
        self._whole = Call(name="line.backward", blocks=whole, mean=mean)
        self._open: OpenCall | None = None
        self._lanes: list[Lane] = []
        """Those that the present call concerns; none if the exchange is not open."""
        self._checks = True
        """Whether blocks are checked here. Over shared memory the reducer does that alone."""
        self._found_bad_value = False
        self.first_sent: float | None = None

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return sum((reducer.traffic for reducer in self._reducers), Traffic())

    @property
    def averages(self) -> list[Floats]:
        """See `Exchange`."""
        return self._collector.averages

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return all(reducer.lane.is_open for reducer in self._reducers)

    @property
    def refused(self) -> bool:
        """See `Exchange`; over shared memory the reducer finds it, perhaps long after."""
        return self._found_bad_value or any(lane.found_bad_value for lane in self._lanes)

    def lend(self, block: int, area: int = 0) -> tuple[Floats, Bytes] | None:
        """See `Exchange`. Of several reducers none has memory for a whole block."""
        return self._reducers[0].lend(block, area) if len(self._reducers) == 1 else None

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`; all lanes that are not open are opened at once."""
        closed = [reducer for reducer in self._reducers if not reducer.lane.is_open]
        open_all(closed, address, opening, self._access)

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._found_bad_value = False
        self.first_sent = None
        call = call or self._whole
        elements = [reducer.elements for reducer in self._reducers]
        self._open, concerned = open_call(assigned, weight, call, elements)
        self._lanes = [self._reducers[number].lane for number in concerned]
        self._checks = len(self._reducers) > 1 or isinstance(self._reducers[0].lane, WireLane)
        # The collector first: the answer to a stale key may come as soon as something is sent.
        self._collector.begin(self._open)
        # Looked at after that: the loss of a lane that was lost before was nobody's round, and is
        # never reported again.
        if not self.is_open:
            # The round can't be finished: nothing of it is sent.
            self._lanes = []
            self._collector.lost("the stream to a reducer is not open")
        for lane in self._lanes:
            lane.begin(self._open)

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> None:
        """See `Exchange`."""
        self._submit(block, (flat,), keeps_loss=keeps_loss)

    def submit_nodes(self, block: int, flats: Sequence[Floats]) -> None:
        """See `Exchange`."""
        self._submit(block, flats, keeps_loss=False)

    def _submit(self, block: int, flats: Sequence[Floats], *, keeps_loss: bool) -> None:
        if self._found_bad_value or not self._lanes:
            return
        # Before anything of the block leaves: one with a bad value is not sent at all.
        for flat in flats if self._checks else ():
            assert self._open is not None
            bad = bad_value_of(flat, self._open.call.encoding(self._policy))
            if bad is not None:
                self._found_bad_value = True
                self._inbox.put(bad.failure(self._open.key, self._open.rank, block))
                return
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        for lane in self._lanes:
            lane.send(block, flats, keeps_loss=keeps_loss)

    def submit_data(self) -> None:
        """See `Exchange`."""
        assert self._open is not None
        data = self._open.call.data
        assert data is not None
        self.first_sent = time.perf_counter()
        for lane in self._lanes:  # At most one: see `begin`.
            lane.send_data(data)

    def abstain(self) -> None:
        """See `Exchange`."""
        for lane in self._lanes:
            lane.abstain()

    def end(self) -> None:
        """See `Exchange`; the streams end too if something of the round may be on the way."""
        current, self._open = self._open, None
        # First: what still comes of the round is nobody's.
        self._collector.end()
        # Rule 16: what was sent may wait at the reducer for room that only a lost rank could make.
        if current is not None and current.missing and self.first_sent is not None:
            self.close()

    def close(self) -> None:
        """Ends the streams."""
        for reducer in self._reducers:
            reducer.lane.close()
