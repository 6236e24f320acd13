"""The choice of a data path, from what the coordinator says at a join."""

from __future__ import annotations

from pathlib import Path

from andon.layout import Layout
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.joining import Joined
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.shared_first import SharedFirst

__all__ = ["make_exchange"]


def make_exchange(
    layout: Layout, joined: Joined, inbox: Inbox, shared_dir: Path | None
) -> Exchange:
    """The exchange of a worker that joined; nothing is open yet.

    `shared_dir` is where a reducer of this host may share memory; None: the worker shares none.
    """
    if shared_dir is None or not layout.elements:
        return WireExchange(layout, joined.policy, inbox)
    return SharedFirst(layout, joined.policy, inbox, shared_dir)
