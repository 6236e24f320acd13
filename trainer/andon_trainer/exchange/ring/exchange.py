"""The ring exchange: blocks from rank to rank, with no reducer between them.

Theory of operation. One thread, the ring's, owns the round and both streams (`RingStation`). The
training thread, the reading threads and gRPC's threads queue acts for it, and it does one after the
other. So nothing of the round needs a lock. What an act leads to goes into the link to the next
rank, which frames it on a thread of its own, or into the worker's inbox.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from andon.host.keepalive import RingKeepalive
from andon.host.tls import address_of
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy
from andon_trainer.config import endpoint_of
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import Assigned
from andon_trainer.core.ring_round import RingRound
from andon_trainer.core.values import bad_value_of
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.ring.incoming import PassEnded, PassReceived, RingListener
from andon_trainer.exchange.ring.link import LaneMemory, RingLink
from andon_trainer.exchange.ring.station import RingStation

__all__ = ["RingExchange", "RingPlace", "place_of"]

log = logging.getLogger(__name__)

_EVERYWHERE = ("0.0.0.0", "::")
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Where a worker listens for the rank before it, and under which name others reach it."""

    bind: str
    """An address of this machine."""
    port: int
    """0: any free one."""
    advertised: str
    """The host under which others reach it."""
    lease_s: float
    """How long the coordinator waits for a silent worker. The ring gives up a link later, so that
    the coordinator can say first who was lost."""
    tls: Path | None = None
    """The folder of certificates for both links; None: the ring is not encrypted."""
    lanes: bool = True
    """Whether TCP lanes carry the messages, where they can be opened."""
    lane_patience_s: float | None = None
    """How long one may stand still while its other end answers over gRPC; None: three leases, at
    least 10 s."""


def place_of(bind: str, coordinator: str, lease_s: float, tls: Path | None = None) -> RingPlace:
    """Decides where to listen, and under which host others reach it.

    Args:
        bind: a host, host:port or [host]:port; empty: where the coordinator is reached from.
        coordinator: the coordinator, as host:port.
        lease_s: see `RingPlace`.
        tls: the folder of certificates; None: the ring is not encrypted.

    Raises:
        ValueError: `bind` is none of these, or is `off`, so that it should not have joined a ring.
    """
    if bind:
        host, port = endpoint_of("ring_bind (ANDON_RING_BIND)", bind)
    else:
        host, port = _reaching(coordinator), 0
    advertised = _reaching(coordinator) if host in _EVERYWHERE else host
    return RingPlace(bind=host, port=port, advertised=advertised, lease_s=lease_s, tls=tls)


def _reaching(coordinator: str) -> str:
    """This machine's address on the way to the coordinator; loopback if there is no way."""
    host, _, port = coordinator.rpartition(":")
    with suppress(OSError, ValueError):
        *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # Sends nothing: it only picks a route.
            return _plain(str(probe.getsockname()[0]))
    return "127.0.0.1"


def _plain(host: str) -> str:
    """127.0.0.1 for any address of the loopback network: that is where everybody listens."""
    return "127.0.0.1" if ipaddress.ip_address(host) in _LOOPBACK else host


class RingExchange:
    """An `Exchange` from rank to rank."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        place: RingPlace,
        *,
        checksums: bool = False,
    ) -> None:
        """Makes the vectors of the averages; does not listen yet.

        Args:
            layout: what is exchanged.
            policy: how.
            inbox: where the outcome of each exchange goes.
            place: where it listens.
            checksums: whether each chunk has one.
        """
        self._checked = checksums
        self._layout, self._policy, self._inbox, self._place = layout, policy, inbox, place
        self.averages: list[Floats] = [
            np.zeros(block.elements, dtype=np.float32) for block in layout.blocks
        ]
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        self._assigned: Assigned | None = None
        self._call = self._whole
        """The present one."""
        self._weight = 0.0
        self._refused = False
        self.first_sent: float | None = None
        self.sent_bytes = self.received_bytes = 0
        # The sending thread alone writes the one, and the ring's thread alone the other.
        self.listener: RingListener | None = None
        """None: it does not listen."""
        self._thread: threading.Thread | None = None
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes = LaneMemory(place.lanes, place.lane_patience_s or self._keepalive.ping_s)
        self._station = RingStation(inbox, self._connect, self._acts.put)

    def listen(self) -> str:
        """Listens for the rank before this one, if it does not yet; returns where, as host:port.

        Raises:
            ValueError: it can't listen there.
        """
        place = self._place
        if self.listener is None:
            # A queue and a station of its own for each listener: what is left of the last one's
            # threads must not reach these.
            self._acts = queue.SimpleQueue()
            self._station = RingStation(self._inbox, self._connect, self._acts.put)
            self.listener = RingListener(
                place.bind,
                place.port,
                self._heard,
                self._keepalive,
                place.tls,
                lanes=place.lanes,
            )
            self._thread = threading.Thread(target=self._own, name="andon-ring", daemon=True)
            self._thread.start()
        return address_of(place.advertised, self.listener.port)

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return Traffic.over("ring", self.sent_bytes, self.received_bytes)

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return self.listener is not None

    @property
    def refused(self) -> bool:
        """See `Exchange`; float32 numbers are looked at where they are sent or added."""
        assigned = self._assigned
        # The ring's thread writes `refused`, each time another key as a whole.
        return self._refused or (assigned is not None and self._station.refused == assigned.key)

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`; there is no reducer to connect to."""
        self.listen()

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._assigned, self._weight, self._call = assigned, weight, call or self._whole
        self._refused = False
        self.first_sent = None
        round_ = RingRound(
            assigned,
            weight,
            self._call,
            self._layout,
            self._policy,
            self.averages,
            checked=self._checked,
        )
        # Given away with this: from here on only the ring's thread uses it.
        self._acts.put(lambda: self._station.begin(round_))

    def submit(self, block: int, flat: Floats, *, keeps_loss: bool = False) -> None:
        """See `Exchange`."""
        assert self._assigned is not None
        if self._refused:
            return
        encoding = self._call.encoding(self._policy)
        # Float32 numbers are looked at when they are sent or added, while they are in the cache.
        bad = None if encoding is Encoding.FLOAT32 else bad_value_of(flat, encoding)
        if bad is not None:
            self._refused = True
            self._inbox.put(bad.failure(self._assigned.key, self._assigned.rank, block))
            return
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        # With the key: when the act is done, another round may be the present one.
        key = self._assigned.key
        given = functools.partial(RingRound.submit, block=block, flat=flat, keeps_loss=keeps_loss)
        self._acts.put(lambda: self._station.act(key, given))

    def submit_nodes(self, block: int, flats: Sequence[Floats]) -> None:
        """Is never called: a ring adds in another order than the tree, and grains refuse it."""
        raise AssertionError("a ring exchanges no nodes")

    def lend(self, block: int, area: int = 0) -> None:
        """None: a ring has no memory that a neighbour reads."""

    def submit_data(self) -> None:
        """See `Exchange`."""
        assert self._assigned is not None
        self.first_sent = time.perf_counter()
        key = self._assigned.key
        self._acts.put(lambda: self._station.act(key, RingRound.submit_data))

    def abstain(self) -> None:
        """See `Exchange`: the weight 0 of the header says it."""
        assert self._weight == 0, "a rank with a weight gives something"

    def end(self) -> None:
        """See `Exchange`; the round's streams end, too."""
        assigned, self._assigned = self._assigned, None
        if assigned is not None:
            # With the key, as in `submit`.
            self._acts.put(lambda: self._station.end(assigned.key))

    def close(self) -> None:
        """Ends both streams and stops listening."""
        listener, self.listener = self.listener, None
        if listener is None:
            return
        assert self._thread is not None
        self._acts.put(self._station.forget)
        self._acts.put(None)
        # The thread first: it must not use the listener's streams once they are ended.
        self._thread.join()
        listener.close()

    @property
    def _keepalive(self) -> RingKeepalive:
        return RingKeepalive.of(self._place.lease_s)

    def _own(self) -> None:
        """The ring's thread: does the queued acts, one after the other."""
        # Those of this listener: `listen` makes others for the next one.
        acts, station = self._acts, self._station
        # Of the stations before: a count of traffic must not go back. Their threads have ended.
        before = self.received_bytes
        while (act := acts.get()) is not None:
            try:
                act()
            except Exception as error:
                # The boundary of this thread: the round is void, and the thread goes on.
                log.exception("the ring failed")
                station.lose(f"the ring failed: {type(error).__name__}: {error}")
            self.received_bytes = before + station.received_bytes

    def _heard(self, event: PassReceived | PassEnded) -> None:
        """Runs on a reading thread."""
        self._acts.put(functools.partial(self._station.take, event))

    def _connect(self, address: str) -> RingLink:
        """Runs on the ring's thread."""
        return RingLink(
            address,
            self._keepalive,
            self._count,
            self._link_lost,
            self._lanes,
            self._place.tls,
        )

    def _count(self, size: int) -> None:
        """Runs on the sending thread."""
        self.sent_bytes += size

    def _link_lost(self, link: RingLink, why: str, greatest: Key | None) -> None:
        """Runs on a thread of gRPC's."""
        self._acts.put(lambda: self._station.link_ended(link, why, greatest))
