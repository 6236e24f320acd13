"""How far a worker that learns has come; `learning` has the rules."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon_coordinator.core.events import (
    ScalarAllReduceArrived,
    StandingRequest,
    WorkRequested,
)

__all__ = ["Learning"]

_PATIENCE_S = 0.04
_PART_OF_STEP = 10
"""How much later a round opens for a learner that is one step behind, at its first chance: the
longer of that, and of one part in so many of a step's time. Without it the line makes the whole
step with a worker less."""

_MOST_PATIENCE_S = 2.0
"""How much later one opens at most."""

_STEPS_IN_VAIN = 8
"""After so many steps in which it came no nearer, one that seems to be far gets a chance, too."""


@dataclass(slots=True, eq=False)
class Learning:
    """What the line knows of one learner."""

    began_at: float
    late: bool = False
    """Whether it has the state, and attends because it computes what it owes; see `late`."""
    recalled_at: float | None = None
    """When it was late, asked for work, and its round was made void for it; it asks again."""
    listening: bool = False
    """Whether it hears the averages of every round that opens from now on."""
    follows: bool = False
    """Whether it is sent the state of a head, and everything that happened after that head."""
    installed: bool = False
    """Whether it has that state."""
    first_step: int = 0
    """Steps committed at that head."""
    behind: deque[Key] = field(default_factory=deque)
    """Records after its head, as far as it has told."""
    gained_at: int = 0
    """The line's step when it was as near as never before."""
    voided: Key | None = None
    """A round on the line's head that it was assigned and told to be void."""
    heard_void: Key | None = None
    """The last such round that it had heard of when it asked for work."""
    next: StandingRequest | None = None
    """What it asks for once the round is committed that it holds the averages of."""
    waits_for: ScalarAllReduceArrived | WorkRequested | None = None
    """What its script waits for that others do: a number's mean, or the end of an epoch."""
    chance_s: float | None = None
    """How long the next round waits for it, once all others wait for that; None: not at all."""
    waits_since: float | None = None
    """Since when they do; None: they don't yet, or not for it."""
    waited_s: float = 0.0
    """How long rounds waited for it."""
    _at: Key | None = None
    """The head that it asked for work at."""
    _at_since: float = 0.0
    _own_step_s: float | None = None
    """How long it took to make up its last step; None: it has made up none."""
    _nearest: int | None = None
    _late: int = 0
    """How many chances it has missed."""
    _next_chance: int = 0
    """The line's step from which on it gets another one."""

    @classmethod
    def of_late(cls, step: int, now: float) -> Learning:
        """A late worker's: it is at the line's head, and its stream to listen is to be opened."""
        learning = cls(began_at=now, late=True)
        learning.follow(step)
        learning.installed = True
        return learning

    @property
    def in_words(self) -> str:
        """How far it has come, for people."""
        if not self.follows:
            return "learning: waits for the state"
        if not self.installed:
            return "learning: receives the state"
        steps = len(self.behind)
        return f"learning: {steps} step{'' if steps == 1 else 's'} behind"

    @property
    def in_void_round(self) -> bool:
        """Whether its script may still work on a void round, for which it has asked before."""
        return self.voided is not None and self.heard_void != self.voided

    def follow(self, step: int) -> None:
        """It is sent the state at `step`, and what follows."""
        self.follows, self.installed = True, False
        self.first_step = self.gained_at = step
        self.behind.clear()
        self.voided = self._at = self._nearest = self._own_step_s = None

    def stop_following(self) -> None:
        """The state did not reach it."""
        self.follows = self.installed = False
        self.behind.clear()
        self.next = None
        self.chance_s = self.waits_since = None

    def reached(self, head: Key, step: int) -> None:
        """It is at a head now; the line is at `step`."""
        self.next = None
        # Keys rise, so whatever is not above its head is done.
        while self.behind and self.behind[0] <= head:
            self.behind.popleft()
        if self._nearest is None or len(self.behind) < self._nearest:
            self._nearest, self.gained_at = len(self.behind), step

    def waits_at(self, head: Key, now: float) -> None:
        """Its script waits at a head: it is about to make up the next step."""
        if self._at is not None and head != self._at:
            self._own_step_s = now - self._at_since
        self._at, self._at_since = head, now

    def may_be_near(self, step: int, now: float, step_s: float) -> bool:
        """Whether it may ask for work in a moment, since it is one step behind.

        By the time that its last step took it. The next round would wait in vain for one that is
        at the beginning of a step; that one comes by itself, or is nearer after the next step.
        Of its first step only that is known: its script waits, with one sample to compute, for the
        same averages as the others, who computed a share.
        """
        if step - self.gained_at >= _STEPS_IN_VAIN:
            return True
        if self._own_step_s is None:
            return self._at is not None and now - self._at_since >= step_s / 2
        return self._at_since + self._own_step_s - now <= self._patience_s(step_s)

    def give_chance(self, step: int, step_s: float = 0.0) -> None:
        """It is one step behind: the next round may wait for it, unless it was late just now.

        Its time begins once the others wait for that round: until then they move their weights, and
        it moves its own.

        Chances become rarer, and each wait longer than the one before, up to a step's time. So the
        line waits for the same part of its time, and lets in a worker with a slower link, too.

        Args:
            step: the line's.
            step_s: how long the line's last step took.
        """
        if step >= self._next_chance and self.chance_s is None:
            self.chance_s = self._patience_s(step_s)

    def _patience_s(self, step_s: float) -> float:
        """How long a round waits for it, if it does."""
        first_s = max(_PATIENCE_S, step_s / _PART_OF_STEP)
        longest_s = min(max(_PATIENCE_S, step_s), _MOST_PATIENCE_S)
        return min(first_s * 2.0 ** min(self._late, 10), longest_s)

    def holds_up(self, now: float) -> bool:
        """Whether the next round, for which all others wait by now, waits for it."""
        if self.chance_s is None:
            return False
        if self.waits_since is None:
            self.waits_since = now
        return now < self.waits_since + self.chance_s

    def end_wait(self, now: float) -> None:
        """Nobody waits for it any more."""
        if self.waits_since is not None and self.chance_s is not None:
            # The line never waits for longer, though a tick may notice later that it is over.
            self.waited_s += min(now - self.waits_since, self.chance_s)
        self.chance_s = self.waits_since = None

    def was_late(self, step: int, now: float) -> None:
        """The round opens without it."""
        self.end_wait(now)
        self._late += 1
        self._next_chance = step + 2 ** min(self._late, 10)
