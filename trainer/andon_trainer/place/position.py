"""Position: where a worker stands in its run. A value; asking for it waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key
from andon_trainer.core.events import Assigned, TransferAsked

__all__ = ["Position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a worker stands at one moment. After anything that waits, ask for a new one."""

    worker: int | None = None
    """The number that the line gave this worker; None before it has joined."""
    head: Key | None = None
    """The key of the last record that this worker applied; None before it holds weights."""
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    """The next position of the data."""
    step: int = 0
    """Number of committed steps."""
    assigned: Assigned | None = None
    """The current round's assignment; None before the first."""
    stop_reason: str = ""
    """Why the run is over; empty if it is not."""
    doubts: int = 0
    """Counts the times when a gradient that was computed before must not be sent again."""
    installed_from: TransferAsked | None = None
    """The transfer that brought the state which was installed last; None: its own state.

    Compare it by identity: two transfers may be equal."""
    pacing: bytes = b""
    """What the line knows of its workers' speed, for a checkpoint; nobody here reads it."""
    digest_every: int = 0
    """The interval, in steps, at which workers compare digests of their weights; 0: never."""
    halt: HaltEvidence | None = None
    """The halt that the line is in, as far as this worker knows."""
    coordinator_can: frozenset[str] = frozenset()
    """What the coordinator can do that one of an earlier version can't."""

    @property
    def digest_due(self) -> bool:
        """Whether workers compare digests of their weights at this step."""
        return bool(self.digest_every) and self.step % self.digest_every == 0
