"""Run events: what happened to a line, as people look it up later."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["AGAIN", "RunEvent", "RunEventKind"]

AGAIN = "again, "
"""How the text of `joined` begins if the process was on the line before."""


class RunEventKind(enum.Enum):
    """What happened; the values are those of the journal, of the board and of exports."""

    STARTED = "started"
    """The service began the run, or went on with it."""
    JOINED = "joined"
    CAUGHT_UP = "caught_up"
    """A worker that was behind has the line's state; the text says what that cost the others."""
    NOTICE = "notice"
    """A worker's machine is about to go; the text says what the worker knows of it."""
    LEFT = "left"
    """A worker went on purpose."""
    LOST = "lost"
    DROPPED = "dropped"
    """A person sent a worker away, or the line did because it computes wrong."""
    ATTEMPT = "attempt"
    """A step is tried again; the text says why."""
    HALTED = "halted"
    ANSWERED = "answered"
    ARITHMETIC = "arithmetic"
    """A worker joined whose arithmetic is not the line's; the text says what differs."""
    CONVICTED = "convicted"
    """A worker computed wrong, as two others say; the text says what."""
    SPIKE = "spike"
    """The line did something about a spike by itself; the text says what, and about which."""
    SLOW = "slow"
    """The others waited for a worker; the text says why."""
    EASED = "eased"
    """A slow worker is dealt less, or as the others again; the text says how slow it is."""
    EVICTED = "evicted"
    """A slow worker follows the line and computes nothing, or takes part again."""
    OVERFLOW = "overflow"
    """A step moved no weight, because scaled gradients overflowed."""
    MEAN = "mean"
    """From this step on gradients have another mean; the text says which one."""
    CHECKPOINT = "checkpoint"
    CHECKPOINT_MISSED = "checkpoint_missed"
    WENT_BACK = "went_back"
    """The line went on from an older record: nobody held its last one."""
    COMPLETE = "complete"
    SESSION = "session"
    """All ranks of a session are there."""
    SESSION_OVER = "session_over"
    """A session ended, for all its ranks alike; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One thing that happened.

    Ids rise in the order in which things happened, and are unique in a run. Those of events that an
    older journal tells only by other tables are below 0.
    """

    id: int
    kind: RunEventKind
    worker: int | None
    """Whom it is about; None: the line."""
    step: int
    """The step that it happened in or after."""
    text: str
    """The rest, for people; a worker's own words may be in it."""
    at_unix_s: float

    @property
    def again(self) -> bool:
        """Whether a process joined that was on the line before."""
        return self.kind is RunEventKind.JOINED and self.text.startswith(AGAIN)
