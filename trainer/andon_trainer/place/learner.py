"""The learner: what a worker has open while it learns the state of a line that trains on.

`core.attending` says what it does with the rounds that it hears of.

A worker that is late on a line with a quorum hears in the same way. The others wait until it does,
and it may be in the middle of a long computation. So the thread that reads the control stream opens
its listening streams (`hear`); all else here is the training thread's.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from andon.host.logs import LogEvent
from andon.protocol.capabilities import LEARNING
from andon.protocol.records import Key
from andon_trainer.core.attending import Attending
from andon_trainer.core.events import Assigned, LearningAsked, ListeningLost
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.path import Inbox, Traffic
from andon_trainer.exchange.route import Route, RouteFailed
from andon_trainer.exchange.star.heard import HeardExchange

__all__ = ["Learner", "advice_for"]

log = logging.getLogger(__name__)

_MOST_TRIES = 3
"""After so many in vain this worker gets the line's state as if it could not learn."""


class Learner:
    """One worker's listening streams. Used by one thread, but for `hear`."""

    def __init__(self, link: Connection, route: Route, inbox: Inbox) -> None:
        """Listens to nothing yet."""
        self._link, self._route, self._inbox = link, route, inbox
        self._heard: HeardExchange | None = None
        self._pending = 0
        """How often `hear` has opened, or found, streams that `hear_on` was not called for yet."""
        self._opening = threading.Lock()
        """Held for both."""
        self._before = Traffic()
        """What went over streams that are closed."""
        self._opened_early = False
        """Whether it has tried to open its exchange, since it listens."""
        self._tries = 0
        """How often it has begun to learn since it had caught up, or was on a roster."""
        self._able = True
        self._moving_since: float | None = None
        """Since when it gets the state that it goes on from; None: it does not yet."""
        self._lacks_since: float | None = None
        """Since when its script waits for averages that the others hold."""

    @property
    def exchange(self) -> HeardExchange | None:
        """The exchange of the rounds that it attends; None: it has no listening streams."""
        return self._heard

    @property
    def traffic(self) -> Traffic:
        """What was heard so far."""
        return self._before if self._heard is None else self._before + self._heard.traffic

    def able(self, capabilities: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the worker's `capabilities` that the next Join names."""
        # A line with a quorum takes nobody who can't. It gives its state by a transfer all the same
        # to a worker that has failed to learn.
        if self._able or self._link.policy.quorum is not None:
            return capabilities
        return tuple(each for each in capabilities if each != LEARNING)

    def listen(self, asked: LearningAsked) -> bool:
        """Opens listening streams; False: that can't be done, and it does not learn any more."""
        self.close()
        self._tries += 1
        if self._tries > _MOST_TRIES:
            self._give_up(f"it was tried {_MOST_TRIES} times in vain")
            return False
        link = self._link
        try:
            self._heard = self._route.listen(link.joined, asked.reducers, link.address, link.number)
        except RouteFailed as failed:
            self._give_up(str(failed))
            return False
        text = "learning the line's state while the others train on"
        log.info(LogEvent("learning", text))
        return True

    def hear(self, assigned: Assigned, stream: int) -> bool:
        """Opens listening streams, as long as there are none: a round goes on without this worker.

        The thread that reads the control stream calls it; `hear_on` follows on the other thread.

        Args:
            assigned: that round.
            stream: the control stream that said so.

        Returns:
            Whether every average from now on is heard.
        """
        link = self._link
        with self._opening:
            if stream != link.number:
                return False
            if self._heard is None:
                try:
                    heard = self._route.listen(link.joined, assigned.reducers, link.address, stream)
                except (RouteFailed, JoinRefused) as failed:
                    text = f"this worker is late, and can't hear the others' rounds ({failed})"
                    log.warning(LogEvent("not_heard", text, why=str(failed)))
                    return False
                if stream != link.number:  # Meanwhile the worker has joined again.
                    heard.close()
                    return False
                self._heard = heard
            self._pending += 1
            return True

    def hear_on(self) -> None:
        """The training thread knows of what `hear` has done."""
        with self._opening:
            self._pending = max(0, self._pending - 1)

    def _give_up(self, why: str) -> None:
        self._able = False
        text = (
            f"this worker can't learn the line's state while the others train on ({why}): they "
            "will wait for it instead"
        )
        log.warning(LogEvent("learning_given_up", text, why=why))

    def state_moves(self) -> None:
        """From now on it is told of each step, whose averages it hears."""
        self._moving_since = time.monotonic()

    def advice(self, step_bytes: int, steps: int, state_bytes: int) -> str:
        """What would help if its link is too slow to follow the line; empty if it is not.

        Args:
            step_bytes: of the averages of one step.
            steps: how many steps it was told of since `state_moves`.
            state_bytes: how much state came in that time.
        """
        if self._heard is None or self._moving_since is None:
            return ""
        seconds = time.monotonic() - self._moving_since
        came = state_bytes + self._heard.traffic.received.total()
        return advice_for(step_bytes, steps, came, seconds)

    def forget(self, head: Key) -> None:
        """Drops what was heard of rounds up to the head that this worker has reached."""
        if self._heard is not None:
            self._heard.forget(head)

    def attend(self, assigned: Assigned) -> None:
        """Its script begins an exchange of a round that it is no member of."""
        if self._heard is None:
            return
        joined = self._link.joined
        # It begins anew if a round has another map of reducers than this worker listens at.
        if self._heard.shares != (assigned.reducers or joined.reducers):
            why = "the model is shared by other reducers now than this worker listens at"
            self._inbox.put(ListeningLost(why), self._link.number)
        elif not self._opened_early:
            # Once: where it can't be done, it may have taken long.
            self._opened_early = True
            self._route.open_early(joined, assigned, self._link.address)

    def patience_s(self, *, lacks: bool, now: float) -> float | None:
        """How long what the script waits for may still be on its way; None: there is no limit.

        Args:
            lacks: whether the others hold it already.
            now: a monotonic time.
        """
        if not lacks or self._heard is None:
            self._lacks_since = None
            return None
        if self._lacks_since is None:
            self._lacks_since = now
        # Streams keep their order: whatever older comes says that they are behind, and not empty.
        since = max(self._lacks_since, self._heard.heard_at)
        patience_s = self._link.joined.liveness.lease_s + self._heard.chunk_s
        return max(0.0, since + patience_s - now)

    def made_up(self, head: Key, behind: int) -> None:
        """A step is made up, and so many more are to be."""
        self.forget(head)
        if not behind:
            # A spare goes on learning from here, perhaps for days: earlier tries are over.
            self._tries = 0

    def arrived(self) -> None:
        """It is on a roster, or needs to hear nothing any more."""
        self._tries = 0
        with self._opening:
            # The line may have gone on without it once more, which it has not taken yet.
            if not self._pending:
                self._close()

    def close(self) -> None:
        """Ends the streams."""
        with self._opening:
            self._pending = 0
            self._close()

    def _close(self) -> None:
        if self._heard is not None:
            self._heard.close()
            self._before += self._heard.traffic
            self._heard = None
        self._opened_early = False
        self._moving_since = None


def advice_for(step_bytes: int, steps: int, came_bytes: int, seconds: float) -> str:
    """What would help a worker to which `came_bytes` came, while the line made `steps`.

    Args:
        step_bytes: of the averages of one step.
        steps: of the line, in that time.
        came_bytes: averages and state.
        seconds: the time.

    Returns:
        The link's rate, what would be needed, and the remedy; empty if that rate is enough.
    """
    # The last step's averages may be on their way.
    if not (steps and came_bytes) or came_bytes >= (steps - 1) * step_bytes:
        return ""
    rate, needed = came_bytes / seconds, steps * step_bytes / seconds
    least_s = step_bytes / rate
    # Twice, since a worker on the roster sends as much as it receives.
    local = 2 * math.ceil(least_s * steps / seconds)
    return (
        f"{rate / 1e6:.2f} MB/s came to it, and the averages of this line's steps are "
        f"{needed / 1e6:.2f} MB/s: {step_bytes / 1e6:.1f} MB each {seconds / steps:.2f} s. Over "
        f"this link a worker can follow exchanges that are {least_s:.0f} s apart, or more: let the "
        f"line make local steps (--schedule local --local-steps {local} --overlap), or use a "
        "faster link"
    )


def doing(attending: Attending) -> str:
    """What a worker that learns, or is late, does, for people; empty if it does neither."""
    if not attending.learning:
        return ""
    steps = attending.behind
    what = "late" if attending.late else "learning"
    return f"{what}: {steps} step{'' if steps == 1 else 's'} behind"
