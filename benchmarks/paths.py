"""The data paths that can be measured, by the name that `--paths` takes."""

from __future__ import annotations

from collections.abc import Callable

from andon.arena import SHARED_DIR
from andon.layout import Layout
from andon.terms import Policy
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.shared import SharedExchange

__all__ = ["PATHS"]


def _shared(layout: Layout, policy: Policy, inbox: Inbox) -> Exchange:
    return SharedExchange(layout, policy, inbox, SHARED_DIR)


PATHS: dict[str, Callable[[Layout, Policy, Inbox], Exchange]] = {
    "wire": WireExchange,
    "shared-memory": _shared,
}
"""What makes the exchange of each path; another path is one more line here."""
