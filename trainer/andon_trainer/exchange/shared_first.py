"""Shared memory first: what a worker does that may be on its reducer's host."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from andon.host.arena import SharedMemoryUnavailable
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.collector import Round
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.lane import Carrier, Lane
from andon_trainer.exchange.path import lent_by
from andon_trainer.exchange.shared import SharedExchange
from andon_trainer.exchange.traffic import Traffic

__all__ = ["SharedFirst"]

log = logging.getLogger(__name__)


class SharedFirst:
    """A `Carrier` over shared memory where the reducer offers it, else over the wire.

    It is asked anew each time that a stream is opened; what comes of it is logged if it changed.
    """

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        folder: Path,
        lane: Lane | None = None,
        *,
        tls: Path | None = None,
    ) -> None:
        """Opens nothing yet; memory is shared in `folder`. A `lane` carries its part alone.

        Streams are encrypted with the certificates in `tls`, if there are any.
        """
        self._make_wire = partial(WireExchange, layout, policy, inbox, lane, tls=tls)
        self._shared = SharedExchange(layout, policy, inbox, folder, lane, tls=tls)
        self._wire: WireExchange | None = None
        self._path: Carrier = self._shared
        # Of several reducers, most are on other hosts.
        self._refused_level = logging.WARNING if lane is None else logging.INFO
        self._said = ""

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`."""
        self.close()
        try:
            self._shared.open(address, opening)
            self._path = self._shared
            self._say(logging.INFO, f"exchanging with the reducer at {address} over shared memory")
        except SharedMemoryUnavailable as why:
            self._wire = self._wire or self._make_wire()
            self._wire.open(address, opening)
            self._path = self._wire
            path = "over the wire, not over shared memory"
            text = f"exchanging with the reducer at {address} {path}: {why}"
            self._say(self._refused_level, text)

    @property
    def first_sent(self) -> float | None:
        """See `Exchange`."""
        return self._path.first_sent

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`; over both paths."""
        shared = self._shared.traffic
        return shared if self._wire is None else shared + self._wire.traffic

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

    def lend(self, block: int) -> tuple[Floats, Bytes] | None:
        """See `Lender`."""
        return lent_by(self._path, block)

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._path.begin(assigned, weight, call)

    def carry(self, current: Round) -> None:
        """See `Carrier`."""
        self._path.carry(current)

    def send(self, block: int, flat: Floats) -> None:
        """See `Carrier`."""
        self._path.send(block, flat)

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
