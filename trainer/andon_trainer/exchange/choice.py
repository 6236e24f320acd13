"""The choice of a data path, from what the coordinator says at a join."""

from __future__ import annotations

from andon.layout import Layout
from andon.terms import Topology
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.joining import Joined
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.ring import RingExchange
from andon_trainer.exchange.ring_place import place_of

__all__ = ["make_exchange", "ring_address_of"]


def make_exchange(
    layout: Layout, joined: Joined, inbox: Inbox, *, coordinator: str = "", ring_bind: str = ""
) -> Exchange:
    """The exchange of a worker that joined; no stream is open yet.

    Args:
        layout: what is exchanged.
        joined: what the coordinator said.
        inbox: where it says what comes of its rounds.
        coordinator: where the line is, as host:port.
        ring_bind: where the worker is to listen if the line is a ring; see `LineConfig`.

    Raises:
        ValueError: the worker can't listen there.
    """
    if joined.policy.topology is Topology.RING:
        place = place_of(ring_bind, coordinator, joined.liveness.lease_s)
        ring = RingExchange(layout, joined.policy, inbox, place)
        ring.listen()
        return ring
    return WireExchange(layout, joined.policy, inbox)


def ring_address_of(exchange: Exchange) -> str:
    """Where the rank before a worker reaches it; empty if the line is no ring."""
    return exchange.listen() if isinstance(exchange, RingExchange) else ""
