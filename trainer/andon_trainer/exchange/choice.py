"""The choice of a data path, from what the coordinator says at a join."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.layout import Layout
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Topology
from andon.wire import checksums
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Joined
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.ring import RingExchange
from andon_trainer.exchange.ring_place import place_of
from andon_trainer.exchange.shared_first import SharedFirst
from andon_trainer.exchange.striped import StripedExchange

__all__ = ["make_exchange", "ring_address_of"]

_LEAST_OPENING_S = 5.0
"""A reducer on a crowded host needs a moment, however short the lease is."""


def make_exchange(
    layout: Layout,
    joined: Joined,
    inbox: Inbox,
    config: LineConfig,
    reducers: Sequence[ReducerShare] = (),
) -> Exchange:
    """The exchange of a worker that joined; no stream is open yet.

    Args:
        layout: what is exchanged.
        joined: what the coordinator said.
        inbox: where it says what comes of its rounds.
        config: where the line is, where memory may be shared, and where to listen in a ring.
        reducers: the map; empty, or without addresses: the coordinator's own reducer has it all.

    Raises:
        WrongMap: the map is not the whole model, each element once, cut between chunks.
        ValueError: the worker can't listen where it is told to.
    """
    if joined.policy.topology is Topology.RING:
        place = place_of(config.ring_bind, config.address, joined.liveness.lease_s, config.tls)
        checked = config.checksums and bool(checksums.offered_capabilities())
        ring = RingExchange(layout, joined.policy, inbox, place, checksums=checked)
        ring.listen()
        return ring
    if any(share.address for share in reducers):
        opening_s = max(_LEAST_OPENING_S, joined.liveness.lease_s)
        return StripedExchange(
            layout,
            joined.policy,
            inbox,
            reducers,
            opening_s=opening_s,
            shared_dir=config.shared_dir if layout.elements else None,
            tls=config.tls,
        )
    if config.shared_dir is None or not layout.elements:
        return WireExchange(layout, joined.policy, inbox, tls=config.tls)
    return SharedFirst(layout, joined.policy, inbox, config.shared_dir, tls=config.tls)


def ring_address_of(exchange: Exchange) -> str:
    """Where the rank before a worker reaches it; empty if the line is no ring."""
    return exchange.listen() if isinstance(exchange, RingExchange) else ""
