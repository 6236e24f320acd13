"""The observer: what the parts of the reducer tell whoever measures them."""

from __future__ import annotations

import enum
from typing import Protocol

from andon.protocol.reasons import Reason
from andon_reducer.core.effects import FreeRound

__all__ = ["DataPath", "Direction", "Observer"]


class Direction(enum.Enum):
    """Which way bytes went: `up` from a worker, `down` to one."""

    UP = "up"
    DOWN = "down"


class DataPath(enum.Enum):
    """How bytes went."""

    WIRE = "wire"
    SHARED_MEMORY = "shared-memory"


class Observer(Protocol):
    """Is told what happens; never fails and never waits."""

    def moved(self, direction: Direction, size_bytes: int, path: DataPath = DataPath.WIRE) -> None:
        """A chunk, or a piece of state, came or left: over gRPC, or in place."""

    def holds(self, inflight_bytes: int) -> None:
        """So much is held now for rounds."""

    def freed(self, effect: FreeRound) -> None:
        """A round is over."""

    def refused(self, reason: Reason) -> None:
        """A call was ended with an error."""

    def opened(self) -> None:
        """A stream was opened."""

    def closed(self) -> None:
        """A stream is over."""
