"""The choice of a data path, from what the coordinator says at a join."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from andon.layout import Layout
from andon.reducers import ReducerShare
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.joining import Joined
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.shared_first import SharedFirst
from andon_trainer.exchange.striped import StripedExchange

__all__ = ["make_exchange"]

_LEAST_OPENING_S = 5.0
"""A reducer on a crowded host needs a moment, however short the lease is."""


def make_exchange(
    layout: Layout,
    joined: Joined,
    inbox: Inbox,
    shared_dir: Path | None,
    reducers: Sequence[ReducerShare] = (),
) -> Exchange:
    """The exchange of a worker that joined, with the reducers of a map; nothing is open yet.

    `shared_dir` is where the coordinator's own reducer may share memory with a worker of its host;
    None: this worker shares none.

    Raises:
        ValueError: the map is not the whole model, each element once, cut between chunks.
    """
    if any(share.address for share in reducers):
        opening_s = max(_LEAST_OPENING_S, joined.liveness.lease_s)
        return StripedExchange(layout, joined.policy, inbox, reducers, opening_s=opening_s)
    if shared_dir is None or not layout.elements:
        return WireExchange(layout, joined.policy, inbox)
    return SharedFirst(layout, joined.policy, inbox, shared_dir)
