"""The route: which exchange carries a worker's rounds, and how it follows the map of reducers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from andon.host.arena import MAX_AREAS
from andon.host.tls import TlsError
from andon.protocol.capabilities import SAME_BITS
from andon.protocol.grains import Grains, cover
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Topology
from andon.tcp.proof import CAPABILITY as TCP
from andon.tcp.proof import WIDE_CAPABILITY
from andon.wire import checksums
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Joined
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.path import Exchange, Inbox, Traffic
from andon_trainer.exchange.ring.exchange import RingExchange, place_of
from andon_trainer.exchange.star.bulk_stream import OPENING_S, ReducerAccess
from andon_trainer.exchange.star.heard import HeardAverages, HeardExchange
from andon_trainer.exchange.star.lane_watch import PATIENCE_S
from andon_trainer.exchange.star.reducer_path import ReducerUnfit
from andon_trainer.exchange.star.star import ReducerAway, StarExchange, WrongMap

__all__ = ["Route", "RouteFailed", "make_exchange", "ring_address_of"]

log = logging.getLogger(__name__)

_LEAST_OPENING_S = 5.0
"""A reducer on a busy host needs a moment to answer, however short the lease is."""


class RouteFailed(Exception):
    """No exchange can carry a round; `kind` is the FaultKind to report, the text says why."""

    def __init__(self, kind: str, why: str) -> None:
        """`kind` is a name of `andon.v1.FaultKind`."""
        super().__init__(why)
        self.kind = kind


@contextmanager
def _failing() -> Iterator[None]:
    """Says as which Fault it is reported that an exchange can't be made, or opened."""
    try:
        yield
    except (WrongMap, ReducerUnfit) as error:
        # Trying again would end the same way: the line is configured wrongly.
        raise RouteFailed("PROTOCOL", str(error)) from error
    except (ReducerAway, TlsError) as error:
        raise RouteFailed("DATA_STREAM_LOST", str(error)) from error


class Route:
    """One worker's exchange. It is made anew whenever the map of reducers changes."""

    exchange: Exchange
    """The present one; there is none before `take`."""

    def __init__(self, layout: Layout, inbox: Inbox, config: LineConfig) -> None:
        """Makes no exchange yet; exchanges put their outcomes into the inbox."""
        self._layout, self._inbox, self._config = layout, inbox, config
        self._reducers: tuple[ReducerShare, ...] = ()
        self._before = Traffic()
        """What went over the exchanges of older maps."""

    @property
    def traffic(self) -> Traffic:
        """What this worker sent and received so far."""
        return self._before + self.exchange.traffic

    def take(self, joined: Joined) -> None:
        """Makes the exchange that the answer to Join describes.

        Raises:
            WrongMap: the coordinator's map is not the whole model.
            JoinRefused: a reducer is on another host, and nothing would be encrypted.
            TlsError: the line is a ring, and this worker's certificates can't be used.
        """
        self._make(joined, joined.reducers)

    def follow(self, joined: Joined, assigned: Assigned, address: str) -> None:
        """Makes the exchange that a round's map describes, and opens it if it is not open.

        Args:
            joined: the answer to the latest Join.
            assigned: the round.
            address: the coordinator's.

        Raises:
            RouteFailed: the map is wrong, or a reducer can't be reached, refuses or does not fit.
            JoinRefused: a reducer is on another host, and nothing would be encrypted.
        """
        with _failing():
            self._follow(joined, assigned, address)

    def _follow(self, joined: Joined, assigned: Assigned, address: str) -> None:
        reducers = assigned.reducers or joined.reducers
        if reducers != self._reducers:
            count = len({each.address for each in reducers})
            log.info("the model is shared by %d reducers now", count)
            before = self.exchange
            before.close()
            self._make(joined, reducers)
            # Last: `traffic` counts the old exchange until `_make` has made another one, and
            # the threads of the old one have ended by now.
            self._before += before.traffic
        if not self.exchange.is_open:
            self.exchange.open(address, self._opening(joined, _nodes_of(joined, assigned)))

    def open_early(self, joined: Joined, assigned: Assigned, address: str) -> None:
        """Opens the exchange before a round needs it, if that can be done; else `follow` says why.

        It takes a while, above all where a reducer makes the memory that it shares, and everybody
        waits for a worker that does it in a round. Nothing is sent, so the streams are part of no
        round, and if they end, nobody hears of it.

        Args:
            joined: the answer to the latest Join.
            assigned: a round that this worker is no member of.
            address: the coordinator's.
        """
        # How many contributions a worker has on a line of grains is known with its first share.
        if self.exchange.is_open or joined.plan.grain:
            return
        try:
            self.follow(joined, assigned, address)
        except (RouteFailed, JoinRefused) as error:
            log.debug("the exchange could not be opened early: %s", error)

    def listen(
        self, joined: Joined, reducers: tuple[ReducerShare, ...], address: str, stream: int
    ) -> HeardExchange:
        """Makes an exchange that hears the averages of rounds, and opens it.

        Args:
            joined: the answer to the latest Join.
            reducers: the map; empty: that of the answer.
            address: the coordinator's.
            stream: the control stream on which this worker was asked to listen.

        Raises:
            RouteFailed: the map is wrong, or a reducer can't be reached, or lets nobody listen.
            JoinRefused: a reducer is on another host, and nothing would be encrypted.
        """
        reducers = reducers or joined.reducers
        self._refuse_plain_text(reducers)
        # No shared memory: nothing of what is heard is written by this worker.
        access = replace(_access_of(self._config, joined, reducers), shared_dir=None)
        heard = HeardAverages(self._layout, self._inbox, stream=stream)
        with _failing():
            exchange = HeardExchange(self._layout, joined.policy, heard, reducers, access)
            exchange.open(address, self._opening(joined))
        return exchange

    def _opening(self, joined: Joined, nodes: int = 0) -> OpenRound:
        """The first message of each stream to a reducer; `nodes`: how many a round sends."""
        capabilities = (checksums.CAPABILITY,) if self._config.checksums else ()
        if self._config.tcp:
            capabilities = *capabilities, TCP
            if self._config.connections != 1:
                capabilities = *capabilities, WIDE_CAPABILITY
        if joined.plan.grain:
            capabilities = *capabilities, SAME_BITS
        return OpenRound(
            joined.run_id,
            joined.worker,
            joined.session_token,
            capabilities,
            contribution_areas=min(nodes, MAX_AREAS),
        )

    def _refuse_plain_text(self, reducers: Sequence[ReducerShare]) -> None:
        # Before anything is sent there: the coordinator may name a reducer on any host.
        for share in reducers:
            if share.address and (heard := self._config.heard_at("reducer", share.address)):
                raise JoinRefused.in_the_clear(heard)

    def _make(self, joined: Joined, reducers: tuple[ReducerShare, ...]) -> None:
        self._refuse_plain_text(reducers)
        self.exchange = make_exchange(self._layout, joined, self._inbox, self._config, reducers)
        self._reducers = reducers


def make_exchange(
    layout: Layout,
    joined: Joined,
    inbox: Inbox,
    config: LineConfig,
    reducers: Sequence[ReducerShare] = (),
) -> Exchange:
    """Makes the exchange of a worker that joined; no stream is open yet.

    Args:
        layout: what is exchanged.
        joined: the coordinator's answer to Join.
        inbox: where the outcomes go.
        config: where the line is, where memory may be shared, and where to listen in a ring.
        reducers: the map; empty, or without addresses: the coordinator's own reducer has it all.

    Raises:
        WrongMap: the map is not the whole model, each element once, cut between chunks.
        ValueError: the worker can't listen at the address that is configured.
    """
    if joined.policy.topology is Topology.RING:
        place = place_of(config.ring_bind, config.address, joined.liveness.lease_s, config.tls)
        place = replace(place, lanes=config.tcp)
        ring = RingExchange(layout, joined.policy, inbox, place, checksums=config.checksums)
        ring.listen()  # Now: each request for work says where this worker listens.
        return ring
    access = _access_of(config, joined, reducers)
    return StarExchange(layout, joined.policy, inbox, reducers, access)


def _nodes_of(joined: Joined, assigned: Assigned) -> int:
    """How many contributions a round takes of this worker on a line of grains; 0 on others."""
    if not joined.plan.grain:
        return 0
    grains = Grains(assigned.batch, joined.plan.grain)
    return len(cover(grains.of(assigned.positions), grains.count))


def _access_of(
    config: LineConfig, joined: Joined, reducers: Sequence[ReducerShare]
) -> ReducerAccess:
    """How this worker reaches the reducers of a map."""
    elsewhere = any(share.address for share in reducers)
    return ReducerAccess(
        opening_s=max(_LEAST_OPENING_S, joined.liveness.lease_s) if elsewhere else OPENING_S,
        shared_dir=config.shared_dir,
        tls=config.tls,
        lane_patience_s=max(PATIENCE_S, 3 * joined.liveness.lease_s),
        connections=config.connections,
    )


def ring_address_of(exchange: Exchange) -> str:
    """Where the rank before a worker reaches it; empty if the line is no ring."""
    return exchange.listen() if isinstance(exchange, RingExchange) else ""
