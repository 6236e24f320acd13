"""The choice of a data path, from what the coordinator says at a join."""

from __future__ import annotations

from andon.layout import Layout
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.joining import Joined
from andon_trainer.exchange.path import Exchange

__all__ = ["make_exchange"]


def make_exchange(layout: Layout, joined: Joined, inbox: Inbox) -> Exchange:
    """The exchange of a worker that joined; nothing is open yet."""
    return WireExchange(layout, joined.policy, inbox)
