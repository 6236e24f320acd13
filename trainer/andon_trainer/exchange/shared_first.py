"""Shared memory first: what a worker does that may be on its reducer's host."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from andon.arena import Unshared
from andon.layout import Layout
from andon.messages import OpenRound
from andon.terms import Policy
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.calls import Call
from andon_trainer.exchange.events import Assigned
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange, Floats, Memory, lent_by
from andon_trainer.exchange.shared import SharedExchange

__all__ = ["SharedFirst"]

log = logging.getLogger(__name__)


class SharedFirst:
    """An `Exchange` over shared memory where the reducer offers it, else over the wire.

    It is asked anew each time that a stream is opened; what comes of it is logged if it changed.
    """

    def __init__(self, layout: Layout, policy: Policy, inbox: Inbox, folder: Path) -> None:
        """Opens nothing yet; memory is shared in `folder`."""
        self._make_wire = partial(WireExchange, layout, policy, inbox)
        self._shared = SharedExchange(layout, policy, inbox, folder)
        self._wire: WireExchange | None = None
        self._path: Exchange = self._shared
        self._said = ""

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`."""
        self.close()
        try:
            self._shared.open(address, opening)
            self._path = self._shared
            self._say(logging.INFO, "exchanging with the reducer over shared memory")
        except Unshared as why:
            self._wire = self._wire or self._make_wire()
            self._wire.open(address, opening)
            self._path = self._wire
            text = f"exchanging with the reducer over the wire, not over shared memory: {why}"
            self._say(logging.WARNING, text)

    @property
    def path(self) -> str:
        """See `Named`."""
        return "shared-memory" if self._path is self._shared else "wire"

    @property
    def first_sent(self) -> float | None:
        """See `Exchange`."""
        return self._path.first_sent

    @property
    def sent_bytes(self) -> int:
        """See `Exchange`; over both paths."""
        return self._shared.sent_bytes + (self._wire.sent_bytes if self._wire else 0)

    @property
    def received_bytes(self) -> int:
        """See `Exchange`; over both paths."""
        return self._shared.received_bytes + (self._wire.received_bytes if self._wire else 0)

    @property
    def averages(self) -> list[Floats]:
        """See `Exchange`."""
        return list(self._path.averages)

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return self._path.is_open

    @property
    def refused(self) -> bool:
        """See `Exchange`."""
        return self._path.refused

    def lend(self, block: int) -> tuple[Floats, Memory] | None:
        """See `Lender`."""
        return lent_by(self._path, block)

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._path.begin(assigned, weight, call)

    def submit(self, block: int, flat: Floats) -> None:
        """See `Exchange`."""
        self._path.submit(block, flat)

    def submit_data(self) -> None:
        """See `Exchange`."""
        self._path.submit_data()

    def abstain(self) -> None:
        """See `Exchange`."""
        self._path.abstain()

    def end(self) -> None:
        """See `Exchange`."""
        self._path.end()

    def close(self) -> None:
        """See `Exchange`."""
        self._path.close()

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            log.log(level, "%s", text)
