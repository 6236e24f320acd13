"""Restarts: whether a worker that died is started again, and when.

A worker that was killed, or that failed in a way that another try may mend, comes back into its
slot. What ended on purpose stays ended: a run that is complete, halted, refused or lost, and what a
person interrupted. So does a script that fails before the line has committed anything: that is a
mistake, not an accident. One that fails at the same step each time is stopped by the line itself.
"""

from __future__ import annotations

import signal

from andon.host.errors import ExitCode

__all__ = ["Restarts"]

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
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


class Restarts:
    """The restarts that a launch may still spend."""

    def __init__(self, most: int) -> None:
        """Allows `most` of them in all, whichever workers need them."""
        self.most = most
        self.used = 0

    def spend(self, code: int, *, trained: bool) -> float | None:
        """Seconds to wait before a worker that ended with `code` is started again; None: it is not.

        Args:
            code: its exit code; negative: the signal that killed it.
            trained: whether the line has committed a step.
        """
        if self.used >= self.most or code in _FINAL or not (trained or code < 0):
            return None
        wait_s = min(_FIRST_WAIT_S * 2.0**self.used, _LONGEST_WAIT_S)
        self.used += 1
        return wait_s
