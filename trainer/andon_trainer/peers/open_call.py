"""A call that was begun: who waits for it, and where its memory is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from andon.protocol.sessions import RankFault, SessionOver
from andon_trainer.core.peer_effects import Opening
from andon_trainer.core.peer_plan import Buffer, Span
from andon_trainer.core.peer_work import Ended, Work
from andon_trainer.errors import CallTimedOut
from andon_trainer.peers.call_room import CallRoom
from andon_trainer.peers.lanes import Outgoing
from andon_trainer.peers.values import Values

__all__ = ["CallHost", "CallOwner", "GroupSession", "OpenCall"]


class GroupSession(Protocol):
    """What a group needs of its session."""

    @property
    def rank(self) -> int:
        """This rank of the session."""

    @property
    def checksums(self) -> bool:
        """Whether all ranks have `crc32c.v1`."""

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over; None while it goes on."""

    def has_left(self, peer: int) -> bool:
        """Whether a rank of the session has said that it makes no more calls."""

    def put(self, peer: int, frame: Outgoing) -> bool:
        """Sends a frame to a rank of the session; True: the kernel has it."""

    def fault(self, fault: RankFault) -> None:
        """Ends the session. Never blocks, and calls nothing back."""

    def later(self, act: Callable[[], None]) -> None:
        """Has something called on a thread that carries no collective."""

    def ended(self, call: OpenCall) -> None:
        """Counts a call that has ended."""


class CallOwner(Protocol):
    """What a call needs of its group."""

    session: GroupSession
    room: CallRoom

    def late(self, call: OpenCall, timeout_s: float) -> str:
        """What people read of a call that has not ended in time."""


class CallHost(Protocol):
    """Who makes a call that goes through memory alone."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the session that are waited for."""

    def help(self, call: OpenCall, timeout_s: float | None) -> None:
        """Makes calls up to this one, unless another thread makes them."""


class OpenCall:
    """A call that was begun. Any thread may wait for it."""

    def __init__(self, group: CallOwner, work: Work, ranks: int) -> None:
        """Of a group's `begin`; the group has so many ranks."""
        self._group = group
        self.work = work
        self.values = Values.of(work, group.session.rank, ranks)
        self.began = time.monotonic()
        self.opening: Opening | None = None
        """Its state, if it goes over lanes."""
        self.host: CallHost | None = None
        """Who makes it, if it goes through memory alone."""
        self.place = 0
        """Its number then."""
        self._open = threading.Lock()
        """Held until the call has ended."""
        self._open.acquire()
        self._lock = threading.Lock()
        """Guards the end, and who is told."""
        self._ended = False
        self._error: BaseException | None = None
        self._told: list[Ended] = []
        self._scratch: memoryview | None = None

    @property
    def number(self) -> int:
        """Its number in the group; of a SEND, among those of its sender to its receiver."""
        return self.place if self.opening is None else self.opening.number

    @property
    def sender(self) -> int | None:
        """Of a receive that has ended: the sender's rank in the group."""
        return None if self.opening is None else self.opening.peer

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the call has ended.

        Raises:
            SessionEnded: the session is over.
            CallTimedOut: it has not ended in time; it stays open.
        """
        began = time.monotonic()
        if self.host is not None and not self._ended:
            self.host.help(self, timeout_s)
        if not self._ended:
            left_s = -1.0
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - (time.monotonic() - began))
            if not self._open.acquire(timeout=left_s):
                raise CallTimedOut(self._group.late(self, timeout_s or 0.0))
            self._open.release()
        if self._error is not None:
            raise self._error

    def then(self, ended: Ended) -> None:
        """Has `ended` called once; at once if the call has ended."""
        with self._lock:
            if not self._ended:
                self._told.append(ended)
                return
        ended(self._error)

    def end(self, error: BaseException | None) -> None:
        """Ends the call, unless it has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, error
            told, self._told = self._told, []
            scratch, self._scratch = self._scratch, None
        # First: to let memory go may take long.
        self._open.release()
        # A lane may still write into that of a call that failed.
        if scratch is not None and error is None:
            self._group.room.give_back(scratch)
        del scratch
        for each in told:
            self._group.session.later(partial(each, error))

    def view(self, span: Span) -> memoryview:
        """The memory of a span."""
        if span.buffer is Buffer.SCRATCH:
            return self._scratched()[span.start : span.stop]
        part = self.work.parts[span.part]
        views = part.gives if span.buffer is Buffer.GIVES else part.takes
        whole = views[span.index]
        return whole if span.size == whole.nbytes else whole[span.start : span.stop]

    def leaving(self, spans: Iterable[Span]) -> list[memoryview]:
        """The memory of spans that leave this rank now. What is input was looked at, if need be.

        Raises:
            BadValue: it has a value that is not finite, and the gate is closed to it.
        """
        chosen = list(spans)
        views = [self.view(span) for span in chosen]
        assert self.opening is not None
        if self.values.gate is not None and not self.opening.checked:
            for span, view in zip(chosen, views, strict=True):
                if span.buffer is Buffer.GIVES:
                    self.values.require_finite(span, view)
        return views

    def _scratched(self) -> memoryview:
        with self._lock:
            if self._scratch is None:
                assert self.opening is not None
                assert self.opening.flow is not None
                self._scratch = self._group.room.take(self.opening.flow.plan.scratch_bytes)
            return self._scratch
