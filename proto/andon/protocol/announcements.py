"""Announcements: what a coordinator tells its reducers, so that they serve nothing that it did not.

A reducer knows workers by their session tokens. Which rounds are open, who is an end of a transfer,
and who was dropped, only the coordinator knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.records import Key

__all__ = [
    "Announcement",
    "RoundOpening",
    "Serial",
    "Session",
    "SessionsRevoked",
    "TransferOpening",
]

Serial = tuple[int, int]
"""Of a session token: the term, and a number that grows with each join in it."""


@dataclass(frozen=True, slots=True)
class Session:
    """One join of a worker: from its JoinAccepted until the worker joins again."""

    worker: int
    serial: Serial


@dataclass(frozen=True, slots=True)
class RoundOpening:
    """A round was opened; no worker was given a greater key yet."""

    key: Key


@dataclass(frozen=True, slots=True)
class TransferOpening:
    """A state transfer begins; nobody but these two sessions may open its ends."""

    transfer_id: int
    donor: Session
    joiner: Session
    beside_training: bool = False
    """Whether rounds run meanwhile, so that it may take as long as it moves."""
    holds_up: bool = False
    """Whether workers wait for it that could train, so that it is given up early if it is slow."""


@dataclass(frozen=True, slots=True)
class SessionsRevoked:
    """A worker was dropped: its sessions below `least` open nothing, and what they opened ends."""

    least: Session


Announcement = RoundOpening | TransferOpening | SessionsRevoked
