"""Restarts: which processes that died are started again, when, and from what state.

A worker that is alone with its death brings the newest whole checkpoint of the run. Otherwise it
gets the line's state from the others.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from andon.host.errors import ExitCode, ResumeRefused
from andon.host.manifest import checkpoints_in
from andon_cli.config import RunConfig
from andon_cli.launching.follower import Follower
from andon_cli.launching.processes import Child, line_slot
from andon_server.resuming import search_history

__all__ = ["HOUR_S", "Restarts", "Returns"]

_FINAL = frozenset(
    {
        ExitCode.COMPLETE,
        ExitCode.HALTED,
        ExitCode.REFUSED,
        ExitCode.LOST,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
        -signal.SIGINT,
    }
)
"""What ended on purpose stays ended."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0
HOUR_S = 3600.0


class Restarts:
    """Which workers that died are started again, and when.

    A worker that was killed, or that failed in a way that another try may fix, comes back into its
    slot. A script that fails before the line has committed anything does not: that is a mistake in
    the script, not an accident. One that fails at the same step again and again is stopped by the
    line itself.

    The budget is for an hour: what dies more often has a cause that does not pass, and what dies
    now and then over weeks is no reason to end a run.
    """

    def __init__(self, most: int) -> None:
        """Allows `most` restarts within any hour, for all workers together."""
        self.most = most
        self.used = 0
        """Restarts in all."""
        self._lately: deque[float] = deque()
        """When those of the last hour were."""
        self._in_a_row: dict[int, int] = {}
        """Restarts of each slot since its process last did its work, or was stable for an hour."""
        self._last: dict[int, float] = {}
        """When each slot was last started again."""

    def spend(
        self, code: int, now: float, *, trained: bool, slot: int = 0, recovered: bool = False
    ) -> float | None:
        """Seconds to wait before a worker that ended with `code` starts again; None: it does not.

        Args:
            code: its exit code; negative: the signal that killed it.
            now: a monotonic time in seconds.
            trained: whether the line has committed a step.
            slot: whose process it was.
            recovered: whether the process that was started again last did its work.
        """
        if code in _FINAL or not (trained or code < 0) or self.left(now) <= 0:
            return None
        stable = now - self._last.get(slot, now) >= HOUR_S
        row = 0 if recovered or stable else self._in_a_row.get(slot, 0)
        self._in_a_row[slot] = row + 1
        self._last[slot] = now
        self._lately.append(now)
        self.used += 1
        # At once after an accident; a second one in a row may have a cause that takes time to pass.
        return min(_FIRST_WAIT_S * 2.0 ** (row - 1), _LONGEST_WAIT_S) if row else 0.0

    def left(self, now: float) -> int:
        """How many restarts are left at a moment."""
        while self._lately and now - self._lately[0] >= HOUR_S:
            self._lately.popleft()
        return self.most - len(self._lately)


class Returns:
    """What is known of the workers that were started again."""

    def __init__(self, config: RunConfig, follower: Follower, workers: Sequence[Child]) -> None:
        """Knows of none yet; `workers` has the present process of each slot."""
        self._config = config
        self._follower = follower
        self._workers = workers
        self._restarted_at: dict[int, float] = {}
        """When the worker in a slot was last started again: a monotonic time in seconds."""
        self._step_of_restart: dict[int, int] = {}
        """The line's step then."""

    def started(self, slot: int) -> None:
        """A new process has the slot of one that died."""
        self._restarted_at[slot] = time.monotonic()
        self._step_of_restart[slot] = self._follower.step

    def has_recovered(self, slot: int) -> bool:
        """Whether the process of a slot was started again, and did its work since."""
        return slot in self._step_of_restart and self._took_part(slot)

    def is_missing(self, slot: int) -> bool:
        """Whether the process of a slot was started again, and has not been on the line since."""
        restarted_at = self._restarted_at.get(slot)
        return restarted_at is not None and not self._follower.was_live_since(
            line_slot(self._config, slot), restarted_at
        )

    def may_get_state(self, child: Child, code: int) -> bool:
        """Whether another worker may have the state that one lacks which ended with `code`.

        A process that was killed, perhaps with others, gets the benefit of the doubt: one that was
        started again may have got the state since it was last seen. A script that fails on all
        workers at once does not: all would come back, and wait for ever for a state that is gone.
        """
        if self._has_holder(child):
            return True
        return code < 0 and not all(map(self.is_missing, self._others(child)))

    async def checkpoint_for(self, child: Child, say: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint, if no worker may have the state that this one needs.

        None: a worker may have it, or there is no checkpoint.
        """
        service = self._config.service
        if self._has_holder(child) or service is None or not checkpoints_in(service.folder):
            return None
        try:
            # On a thread: it reads all of it, and Ctrl-C must work meanwhile.
            found = (await asyncio.to_thread(search_history, service.folder)).newest
        except ResumeRefused as error:
            say(f"no checkpoint can be looked for: {error}")
            return None
        return None if found is None else found[0].absolute()

    def _has_holder(self, child: Child) -> bool:
        """Whether another worker may still have the state that this one needs after a restart."""
        return self._has_elsewhere or any(map(self._took_part, self._others(child)))

    def _others(self, child: Child) -> list[int]:
        """The slots of all workers but this one whose processes run."""
        return [
            slot for slot, each in enumerate(self._workers) if each is not child and not each.ended
        ]

    @property
    def _has_elsewhere(self) -> bool:
        """Whether workers are expected that this launch did not start."""
        service = self._config.service
        return service is None or service.workers > self._config.settings.workers

    def _took_part(self, slot: int) -> bool:
        """Whether the process in a slot has had the line's state, as far as is known here."""
        since = self._step_of_restart.get(slot)
        return since is None or self._follower.step_of(slot) > since
