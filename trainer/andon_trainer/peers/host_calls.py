"""Calls of a group whose ranks are all neighbours: they go through memory, and over no lane.

Theory of operation. Such calls need no core: each is made by one thread, which sleeps in the kernel
while others are behind. Whoever waits for a call makes it, if nobody else does: handing it to
another thread, and waiting for that, costs as much as the rest of a small call. A call that nobody
may wait for is made by the group's own thread. Calls are made in order, whoever makes them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from andon.host.arena import SharedMemoryUnavailable
from andon.protocol.halts import describe_value
from andon.protocol.peer_calls import PendingCall
from andon.protocol.sessions import RankFault, SessionEnd
from andon_trainer.core.announcement import Announcement
from andon_trainer.core.peer_work import Work
from andon_trainer.errors import CallTimedOut, SessionEnded
from andon_trainer.peers.memory import CallDiffers, NeighbourLeft, NeighbourMemory
from andon_trainer.peers.memory_calls import NotFinite, run
from andon_trainer.peers.open_call import OpenCall

__all__ = ["HostCalls", "HostGroup", "differing_fault", "left_fault"]

_log = logging.getLogger(__name__)

_CLOSE_S = 1.0
"""How long the end of a session waits for a call to come out of memory."""


class HostGroup(Protocol):
    """What these calls need of their group."""

    @property
    def stopped(self) -> bool:
        """Whether the session can't go on, as a call has shown, or is over.

        Then no call is made: what it gave would be taken for what the failed one lacks.
        """

    def look(self, awaited: Sequence[int]) -> None:
        """What to do while ranks are waited for; raises if that is in vain."""

    def ended(self, call: OpenCall) -> None:
        """A call has ended well."""

    def faulty(self, call: OpenCall, fault: RankFault) -> None:
        """A call shows that the session can't go on."""

    def without_memory(self, calls: Sequence[OpenCall], why: str) -> None:
        """Memory can't be shared: these calls, the first ones of the group, go over lanes."""

    def late(self, call: OpenCall, timeout_s: float) -> str:
        """What people read of a call that has not ended in time."""

    def named(self, sequence: int, work: Work) -> PendingCall:
        """A call as reports name it."""


class HostCalls:
    """The calls of one group."""

    def __init__(self, group: HostGroup, memory: NeighbourMemory, rank: int, name: str) -> None:
        """Makes nothing yet.

        Args:
            group: whose calls they are.
            memory: what the group's ranks share.
            rank: this rank of the session.
            name: of the group's own thread.
        """
        self._group, self._memory, self._rank, self._name = group, memory, rank, name
        self._lock = threading.Lock()
        """Guards the queue."""
        self._waiting: deque[tuple[int, OpenCall]] = deque()
        self._made = 0
        self._making = threading.Lock()
        """Held by whoever makes calls."""
        self._present: tuple[int, OpenCall] | None = None
        """The call that is being made."""
        self._broken: BaseException | None = None
        """Why no further call can be made."""
        self._usable = True
        self._wakes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """`work`, or `close`."""
        self._thread: threading.Thread | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the session that are waited for."""
        return self._memory.missing

    def begin(self, call: OpenCall, *, awaited: bool) -> int | None:
        """Makes a call, which may be later; returns its number. None: memory can't be shared.

        With `awaited` the caller waits for it at once.
        """
        with self._lock:
            if not self._usable:
                return None
            number, self._made = self._made, self._made + 1
            self._waiting.append((number, call))
        if not awaited:
            self._wake()
        return number

    def help(self, call: OpenCall, timeout_s: float | None) -> None:
        """Makes calls up to this one, unless another thread makes them."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._making.acquire(blocking=False):
            try:
                while not call.done() and self._make_next(deadline, timeout_s):
                    pass
            finally:
                self._making.release()
            if not self._waiting:
                return
        # Whoever makes calls may have looked for more before this one was there.
        self._wake()

    def close(self) -> None:
        """The session is over. No memory of a call is read or written any more."""
        self._memory.end()
        if self._making.acquire(timeout=_CLOSE_S):
            self._making.release()
        self._memory.close()
        self._wakes.put("close")

    def leave(self) -> None:
        """This rank makes no more calls."""
        self._memory.leave()

    # ------------------------------------------------------------------ inside

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._wakes.put("work")

    def _run(self) -> None:
        while self._wakes.get() == "work":
            with self._making:
                while self._make_next(None, None):
                    pass

    def _make_next(self, deadline: float | None, timeout_s: float | None) -> bool:
        """Makes the oldest call; False if there is none, or if none can be made."""
        with self._lock:
            if not self._waiting or not self._usable or self._group.stopped:
                return False
            self._present = self._waiting.popleft()
        number, call = self._present
        if self._broken is not None:
            call.end(self._broken)
            return True
        try:
            return self._make(number, call, self._still(call, deadline, timeout_s))
        finally:
            self._present = None

    def _still(
        self, call: OpenCall, deadline: float | None, timeout_s: float | None
    ) -> Callable[[tuple[int, ...]], None]:
        def still(awaited: tuple[int, ...]) -> None:
            self._group.look(awaited)
            if deadline is not None and time.monotonic() >= deadline:
                raise CallTimedOut(self._group.late(call, timeout_s or 0.0))

        return still

    def _make(self, number: int, call: OpenCall, still: Callable[[tuple[int, ...]], None]) -> bool:
        """Makes a call; whether the next one can be made."""
        memory = self._memory
        try:
            if not memory.opened:
                memory.open(still)
            run(memory, call.work, number, still)
        except SharedMemoryUnavailable as error:
            with self._lock:
                self._usable = False
                calls = [call, *(each for _, each in self._waiting)]
                self._waiting.clear()
            self._group.without_memory(calls, str(error))
        except SessionEnded:
            pass  # Whoever ends the session ends the call.
        except CallTimedOut as error:
            # The neighbours wait for the rest of it: no later call can be made.
            self._broken = error
            call.end(error)
            return True
        except Exception as error:
            self._group.faulty(call, self._fault_of(call.work, error))
        except BaseException as error:
            # Somebody wants the script to end. The call is half made, and none can follow it.
            self._broken = error
            call.end(error)
            raise
        else:
            self._group.ended(call)
            return True
        return False

    def _fault_of(self, work: Work, error: Exception) -> RankFault:
        """The fault that a call's error is."""
        if isinstance(error, NotFinite):
            return _not_finite_fault(work, self._rank, error)
        if isinstance(error, CallDiffers):
            return differing_fault(self._group, work, error)
        if isinstance(error, NeighbourLeft):
            return left_fault(work, error)
        _log.error("a call through memory failed", exc_info=error)
        return RankFault(
            end=SessionEnd.SCRIPT_FAILED,
            culprit=self._rank,
            message=f"rank {self._rank}: {work.call} failed: {error!r}",
        )


def _not_finite_fault(work: Work, rank: int, bad: NotFinite) -> RankFault:
    """The fault of a value that memory's calls found."""
    if bad.reduced:
        value = _value(work, [work.parts[bad.part].takes[0]], bad.element)
        return RankFault(
            end=SessionEnd.NON_FINITE_REDUCTION,
            culprit=None,
            message=f"{work.call}: all inputs are finite, and element {bad.element} of the result "
            f"is {value or 'not finite'}",
            element=(bad.element,),
            value=value,
        )
    assert work.gate is not None
    found = work.gate.explain(bad.part, bad.element)
    value = found.value or _value(work, list(work.parts[bad.part].gives), bad.element)
    element = found.element or (bad.element,)
    place = ", ".join(map(str, element))
    return RankFault(
        end=SessionEnd.NON_FINITE,
        culprit=rank,
        message=f"rank {rank} gave {value or 'a value that is not finite'} in "
        f"{found.parameter or 'element'}[{place}] to {work.call}",
        parameter=found.parameter,
        element=element,
        value=value,
    )


def _value(work: Work, views: list[memoryview], element: int) -> str:
    """What an element is, as text; empty if that is not known."""
    if work.call.dtype != "float32":
        return ""
    for view in views:
        numbers = np.frombuffer(view, np.float32)
        if element < numbers.size:
            return describe_value(float(numbers[element]))
        element -= numbers.size
    return ""


def differing_fault(group: HostGroup, work: Work, differs: CallDiffers) -> RankFault:
    """The fault of a neighbour that made another call."""

    def named(announced: Announcement) -> PendingCall:
        pending = group.named(announced.sequence, work)
        return PendingCall(
            group_name=pending.group_name,
            group=pending.group,
            sequence=announced.sequence,
            call=announced.call,
            open_s=0.0,
        )

    theirs = differs.theirs
    what = "something that can't be read" if theirs is None else str(theirs.call)
    same = theirs is not None and theirs.call == differs.mine.call
    sizes = ", with other sizes" if same else ""
    return RankFault(
        end=SessionEnd.CALLS_DIFFER,
        culprit=differs.rank,
        message=f"call {differs.mine.sequence}: this rank made {differs.mine.call}, and rank "
        f"{differs.rank} {what}{sizes}",
        call=named(differs.mine),
        other_call=None if theirs is None else named(theirs),
    )


def left_fault(work: Work, left: NeighbourLeft) -> RankFault:
    """The fault of a neighbour that is needed, and has left."""
    return RankFault(
        end=SessionEnd.RANK_LEFT,
        culprit=left.rank,
        message=f"rank {left.rank} ended, and {work.call} needs it",
    )
