"""Admission: which calls may begin, and how one that may not go on is ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from andon.protocol import tokens
from andon.protocol.announcements import Serial, Session
from andon.protocol.reasons import Reason
from andon_reducer.core.effects import CallRefusal

__all__ = ["CallLimit", "CallRefused", "SessionTokens"]


class CallRefused(Exception):
    """A call may not go on: carries the refusal up to where the call ends."""

    def __init__(self, reason: Reason, message: str) -> None:
        """`message` is for people: whose fault, the fact, the remedy."""
        super().__init__(message)
        self.refusal = CallRefusal(reason, message)


class SessionTokens:
    """Checks session tokens, and remembers the newest join of each worker.

    A token of an older join opens nothing more. So the token of a process that died is worth
    nothing once another process has its slot, and that of a process that an operator dropped at
    once.
    """

    def __init__(self, secret: bytes) -> None:
        """`secret` is the one with which the coordinator makes tokens."""
        self._secret = secret
        self._newest: dict[tuple[str, int], Serial] = {}
        self._revoked: dict[tuple[str, int], Serial] = {}
        """The least serial that is not revoked, of workers that were dropped."""

    def admit(self, run_id: str, worker: int, token: bytes) -> Serial:
        """Lets a worker open a stream, or a transfer.

        Returns:
            The token's serial; its term is that of the coordinator that gave the token.

        Raises:
            CallRefused: the token is not its, is of an older join than one that was seen, or is
                revoked.
        """
        # First: the serial can be believed only if the token is right.
        serial = tokens.session_serial(self._secret, run_id, worker, token)
        if serial is None:
            text = f"the session token is not worker {worker}'s: join again"
            raise CallRefused(Reason.TOKEN, text)
        newest = self._newest.get((run_id, worker))
        if newest is not None and serial < newest:
            text = f"worker {worker} joined again since this session token was made: join again"
            raise CallRefused(Reason.TOKEN, text)
        if serial < self._revoked.get((run_id, worker), serial):
            raise CallRefused(Reason.TOKEN, f"this session of worker {worker} was ended")
        # Stored only after all checks: a forged token must not replace the right one.
        self._newest[run_id, worker] = serial
        return serial

    def revoke(self, run_id: str, least: Session) -> None:
        """Admits no token of this worker below that of session `least`."""
        known = self._revoked.get((run_id, least.worker), least.serial)
        self._revoked[run_id, least.worker] = max(known, least.serial)


class CallLimit:
    """Limits how many calls of one kind each worker of each run may have at once."""

    def __init__(self, limit: int, what: str) -> None:
        """`what` names the calls in errors."""
        self._limit = limit
        self._what = what
        self._open: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def count(self, run_id: str, worker: int) -> Iterator[None]:
        """Counts a call while it is entered.

        Raises:
            CallRefused: the worker has as many as it may.
        """
        caller = run_id, worker
        if self._open[caller] >= self._limit:
            text = (
                f"worker {worker} has {self._limit} {self._what} here, which is the limit: the "
                "operator may raise --max-streams-per-worker"
            )
            raise CallRefused(Reason.TOO_MANY_STREAMS, text)
        # No await lies between the look above and this, so no call slips in.
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                # A Counter keeps zeros, and workers come with ever new runs.
                del self._open[caller]
