"""Answers to a Join: how far an accepted worker is, or why it is refused."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.protocol.reasons import Reason

__all__ = ["JoinRefusal", "JoinStatus"]


class JoinStatus(enum.Enum):
    """How far a joining worker is; values are those of `andon.v1.JoinStatus`."""

    IN_SYNC = 1
    BEHIND = 2
    RECORD_FOLLOWS = 3
    FRESH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefusal:
    """Why a join is refused: `component` is `mine` at the worker and `theirs` on the line."""

    reason: Reason
    message: str
    component: str = ""
    mine: str = ""
    theirs: str = ""
