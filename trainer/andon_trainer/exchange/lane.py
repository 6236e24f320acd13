"""Lanes: what one of several exchanges carries of a worker's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from andon.protocol.layout import Chunk
from andon_trainer.core.calls import Floats
from andon_trainer.exchange.collector import Collector, Round
from andon_trainer.exchange.path import Exchange

__all__ = ["Carrier", "Lane"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One reducer's part of the model."""

    chunks: Sequence[Sequence[Chunk]]
    """Of each block, in rising order."""
    collector: Collector
    """Of all lanes: it has the buffers, and says when everything is here."""
    opening_s: float
    """How long the reducer has to answer when the stream is opened."""


class Carrier(Exchange, Protocol):
    """An exchange that can be a lane."""

    def carry(self, current: Round) -> None:
        """Takes part in a round that the collector knows of."""

    def send(self, block: int, flat: Floats) -> None:
        """Sends what this lane carries of a block that was looked at."""
