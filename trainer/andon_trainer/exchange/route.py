"""The route: the exchange that carries a worker's rounds, by the newest map of reducers."""

from __future__ import annotations

import logging

from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare
from andon.wire import checksums
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Joined
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.choice import make_exchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.traffic import Traffic

__all__ = ["Route"]

log = logging.getLogger(__name__)


class Route:
    """One worker's exchange, made anew whenever other reducers share the model."""

    exchange: Exchange
    """The present one; there is none before `take`."""

    def __init__(self, layout: Layout, inbox: Inbox, config: LineConfig) -> None:
        """Goes nowhere yet; what comes of exchanges is put into the inbox."""
        self._layout, self._inbox, self._config = layout, inbox, config
        self._reducers: tuple[ReducerShare, ...] = ()
        self._before = Traffic()
        """Of exchanges with reducers of older maps."""

    @property
    def traffic(self) -> Traffic:
        """What this worker sent and received so far."""
        return self._before + self.exchange.traffic

    def take(self, joined: Joined) -> None:
        """Makes the exchange that a join says.

        Raises:
            WrongMap: the coordinator's map is not the whole model.
            JoinRefused: a reducer is on another host, and nothing would be encrypted.
        """
        self._make(joined, joined.reducers)

    def follow(self, joined: Joined, assigned: Assigned, address: str) -> None:
        """Exchanges with the reducers of a round's map, and opens what is not open.

        Args:
            joined: what the coordinator said when this worker joined.
            assigned: the round.
            address: the coordinator's.

        Raises:
            WrongMap: the map is not the whole model.
            JoinRefused: a reducer is on another host, and nothing would be encrypted.
            ReducerAway: one of several reducers can't be reached, or refuses.
            grpc.RpcError: the only reducer can't be reached, or refuses.
            FrameError: its answer can't be read.
            ReducerUnfit: a reducer takes no payload as large as a chunk.
        """
        reducers = assigned.reducers or joined.reducers
        if reducers != self._reducers:
            count = len({each.address for each in reducers})
            log.info("the model is shared by %d reducers now", count)
            before = self.exchange
            before.close()
            self._make(joined, reducers)
            self._before += before.traffic
        if not self.exchange.is_open:
            capabilities = checksums.offered_capabilities() if self._config.checksums else ()
            opening = OpenRound(joined.run_id, joined.worker, joined.session_token, capabilities)
            self.exchange.open(address, opening)

    def _make(self, joined: Joined, reducers: tuple[ReducerShare, ...]) -> None:
        for share in reducers:
            if share.address and (heard := self._config.heard_at("reducer", share.address)):
                raise JoinRefused.in_the_clear(heard)
        self.exchange = make_exchange(self._layout, joined, self._inbox, self._config, reducers)
        self._reducers = reducers
