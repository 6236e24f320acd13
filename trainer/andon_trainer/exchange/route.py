"""The route: the exchange that carries a worker's rounds, by the newest map of reducers."""

from __future__ import annotations

import logging

import grpc

from andon.host.tls import TlsError
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare
from andon.wire import checksums
from andon.wire.frames import FrameError
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Joined
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.bulk import ReducerUnfit
from andon_trainer.exchange.choice import make_exchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.striped import ReducerAway, WrongMap
from andon_trainer.exchange.traffic import Traffic
from andon_trainer.exchange.unreachable import tls_trouble

__all__ = ["Route", "RouteFailed"]

log = logging.getLogger(__name__)


class RouteFailed(Exception):
    """No exchange can carry a round; `kind` is the FaultKind to report, the text says why."""

    def __init__(self, kind: str, why: str) -> None:
        """`kind` is a name of `andon.v1.FaultKind`."""
        super().__init__(why)
        self.kind = kind


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
        try:
            self._follow(joined, assigned, address)
        except (WrongMap, ReducerUnfit) as error:
            # Trying again would end the same way: the line is configured wrongly.
            raise RouteFailed("PROTOCOL", str(error)) from error
        except (ReducerAway, FrameError) as error:
            raise RouteFailed("DATA_STREAM_LOST", str(error)) from error
        except (grpc.RpcError, TlsError) as error:
            why = tls_trouble(error, address, self._config.tls)
            if not why and isinstance(error, grpc.RpcError):
                why = error.code().name
            raise RouteFailed("DATA_STREAM_LOST", f"no reducer at {address}: {why}") from error

    def _follow(self, joined: Joined, assigned: Assigned, address: str) -> None:
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
