"""Lateness: when a round is late by those before it, and what is known of who was slow.

The rules that use it are in `slowness`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon.protocol.slowness import Explanation, Slowness, SlowPhase
from andon_coordinator.core.events import StepTimings
from andon_coordinator.core.suspicion import Delays

__all__ = ["LEAST_S", "STEPS", "Question", "SlownessWatch", "StepWaits", "late_after_s"]

_FACTOR = 1.5
LEAST_S = 0.3
"""Nothing is late that is late by less."""
STEPS = 16
"""So many steps tell who is slow in every step."""
_RECENT = 16


@dataclass(slots=True, eq=False)
class Question:
    """One lateness, and what members answered."""

    key: Key | None
    """The round that is late; None: there is no round, and others wait for work."""
    step: int
    late_s: float
    asked_at: float
    numbers: dict[int, int]
    """What was asked, by worker."""
    alone: bool
    """Whether the round has no other member."""
    others_wait: bool
    """Whether it is known of somebody who was not asked that they wait."""
    answers: dict[int, Explanation] = field(default_factory=dict)
    over_at: float | None = None
    """When the round was complete; None: it is not, as far as is known."""


@dataclass(frozen=True, slots=True)
class StepWaits:
    """Who was last in a step, and for how long the others waited."""

    last: int | None
    """None: nobody stood out."""
    waited_s: float
    seconds: float
    """How long the step took."""
    timings: Mapping[int, StepTimings]
    """By worker."""


@dataclass(slots=True, eq=False)
class SlownessWatch:
    """What is known of who was slow, and the question that is open."""

    latest: dict[int, Slowness] = field(default_factory=dict)
    """By worker."""
    recent: deque[Slowness] = field(default_factory=lambda: deque(maxlen=_RECENT))
    question: Question | None = None
    number: int = 0
    """Of the last question to anybody."""
    tries: tuple[Key | None, int, float] = (None, 0, 0.0)
    """The key of the last lateness, how often it was asked about, and when again at the soonest."""
    idle_since: float | None = None
    """Since when some wait for work, and others have not asked."""
    waits: deque[StepWaits] = field(default_factory=lambda: deque(maxlen=STEPS))
    """Of the last steps."""
    due_s: float | None = None
    """After how long in a round somebody who is slow in every step is asked; None: nobody is."""
    told: dict[int, float] = field(default_factory=dict)
    """When people were told last of a worker that it is slow in every step."""
    kept: deque[tuple[float, int, SlowPhase, str]] = field(default_factory=deque)
    """What the journal got within an hour: when, of whom, and what."""


def late_after_s(rounds: Delays) -> float:
    """After how long a round is late, by those before it."""
    middle = statistics.median(rounds.kept)
    return max(rounds.until_late_s(), _FACTOR * middle, middle + LEAST_S)
