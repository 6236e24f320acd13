"""A rank's part of a trace: its backward passes, its calls, and for whom they waited.

Theory of operation. Without ANDON_TRACE nothing of this is there: a session that is recorded puts
a `RecordedCaller` between each group and the engine, which notes when a call begins. A call ends
for the trace when the first one hears of it: who waits for it, or the thread on which the session
tells of ends.

Whom a call waited for is not known any more when it ends. So a thread looks 50 times a second at
the oldest open call of each group, and adds that time to the ranks of which something is missing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from andon.host.trace import Track
from andon.protocol.peer_calls import PendingCall
from andon.protocol.sessions import SessionOver
from andon_torch.gate import GradientWatch, backward_pass
from andon_torch.identity import Caller
from andon_torch.works import Waitable
from andon_trainer.core import peer_work
from andon_trainer.timeline import Timeline

__all__ = ["Recorded", "RecordedCaller", "Recording"]

_LOOK_S = 0.02


class Recorded(Waitable, Protocol):
    """A call whose span is recorded."""

    @property
    def number(self) -> int:
        """Its number in the group."""

    @property
    def sender(self) -> int | None:
        """Of a receive that has ended: the sender's rank in the group."""


class _Group(Caller, Protocol):
    """A group whose calls are recorded."""

    @property
    def name(self) -> str:
        """The group's name."""

    def begin(self, work: peer_work.Work, *, awaited: bool = False) -> Recorded:
        """Begins a call."""

    def pending_of(self, call: Any) -> PendingCall:
        """A call that is open, and whom it waits for."""


class Recording:
    """Records what one rank does, from before it attends until it has left."""

    def __init__(self, timeline: Timeline) -> None:
        """Takes the rank's timeline, and closes it in the end."""
        self._timeline = timeline
        self._lock = threading.Lock()
        self._open: dict[_RecordedCall, None] = {}
        """Calls that have not ended, oldest first."""
        self._backward: dict[int, tuple[float, int]] = {}
        """Backward passes that go on, by PyTorch's number: when their first call began, and the
        step."""
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="andon-trace-waits", daemon=True)
        self._looking.start()

    def formed(self, rank: int, began: float) -> None:
        """All ranks are there; this one has waited for them since `began`."""
        self._timeline.span("join", began)
        self._timeline.joined(rank)

    def session_over(self, over: SessionOver) -> None:
        """The session is over."""
        self._timeline.instant("session over", why=over.message)

    def close(self) -> None:
        """Records what goes on still, and writes all of it."""
        self._over.set()
        self._looking.join()
        with self._lock:
            calls, passes = list(self._open), dict(self._backward)
            self._backward.clear()
        for call in calls:
            call.end(failed="it had not ended")
        for began, step in passes.values():
            self._timeline.span("backward", began, step=step, failed="it had not ended")
        self._timeline.close()

    # ------------------------------------------------------------------ for calls

    def in_backward(self, number: int, step: int) -> None:
        """A backward pass begins a call in this thread; only its first one counts."""
        with self._lock:
            if number in self._backward:
                return
            self._backward[number] = time.perf_counter(), step
        _at_end_of_backward(partial(self._backward_over, number))

    def _backward_over(self, number: int) -> None:
        with self._lock:
            found = self._backward.pop(number, None)
        if found is not None:
            self._timeline.span("backward", found[0], step=found[1])

    def begun(self, call: _RecordedCall) -> None:
        """A call is open."""
        with self._lock:
            self._open[call] = None

    def ended(self, call: _RecordedCall, **args: Any) -> None:
        """It is not any more."""
        with self._lock:
            if call not in self._open:
                return  # Another thread was faster.
            del self._open[call]
        self._timeline.span_on(Track.CALLS, call.name, call.began, **call.args(), **args)

    def waited(self, call: _RecordedCall, began: float) -> None:
        """The script has waited for the call since then, itself or in a backward pass."""
        # Other threads have no row: what they do overlaps with what the script does.
        if threading.current_thread() is not threading.main_thread() and backward_pass() is None:
            return
        self._timeline.span(f"wait for {call.name}", began, step=call.step)

    def _look(self) -> None:
        """Runs on a thread of its own."""
        looked_at = time.perf_counter()
        while not self._over.wait(_LOOK_S):
            now = time.perf_counter()
            with self._lock:
                calls = list(self._open)
            oldest = {id(call.group): call for call in reversed(calls)}
            for call in oldest.values():
                call.look(now - max(looked_at, call.began))
            looked_at = now


class RecordedCaller:
    """A group whose calls are recorded; see `Caller`."""

    def __init__(self, recording: Recording, group: _Group, watch: GradientWatch) -> None:
        """Of a group; `watch` counts steps."""
        self._recording = recording
        self._group = group
        self._watch = watch

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._group.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks of the session."""
        return self._group.ranks

    def begin(self, work: peer_work.Work, *, awaited: bool = False) -> Waitable:
        """Begins a call, and records it."""
        backward = backward_pass()
        step = self._watch.step_in(backward)
        if backward is not None:
            self._recording.in_backward(backward, step)
        began = time.perf_counter()
        call = self._group.begin(work, awaited=awaited)
        return _RecordedCall(self._recording, self._group, call, work, began, step)


class _RecordedCall:
    """A call that was begun."""

    def __init__(
        self,
        recording: Recording,
        group: _Group,
        call: Recorded,
        work: peer_work.Work,
        began: float,
        step: int,
    ) -> None:
        self.group = group
        self.began = began
        self.step = step
        how = f"({work.call.reduction})" if work.call.reduction else ""
        self.name = f"{work.call.kind.label}{how}"
        self._recording = recording
        self._call = call
        self._what = str(work.call)
        self._bytes = sum(view.nbytes for part in work.parts for view in part.gives)
        self._waits: dict[int, float] = defaultdict(float)
        """For how long something was missing of each rank, in seconds."""
        recording.begun(self)
        call.then(self._told)

    @property
    def sender(self) -> int | None:
        """Of a receive that has ended: the sender's rank in the group."""
        return self._call.sender

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._call.done()

    def then(self, ended: Callable[[BaseException | None], None]) -> None:
        """Has `ended` called once, when it has ended."""
        self._call.then(ended)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for its end; raises what it ended with."""
        if self._call.done():
            self._call.wait(timeout_s)
            return
        began = time.perf_counter()
        try:
            self._call.wait(timeout_s)
        finally:
            if self._call.done():
                self._told(sys.exception())
            self._recording.waited(self, began)

    def end(self, **args: Any) -> None:
        """Its span ends, unless it has."""
        self._recording.ended(self, **args)

    def args(self) -> dict[str, Any]:
        """What the trace says of it."""
        found: dict[str, Any] = {
            "call": self._what, "group": self.group.name, "sequence": self._call.number,
            "bytes": self._bytes, "step": self.step,
        }  # fmt: skip
        # A copy: the looking thread may have this call in hand still.
        waits = {str(rank): round(1000 * spent) for rank, spent in sorted([*self._waits.items()])}
        if waits:
            found["waited_for_ms"] = waits
        return found

    def look(self, spent_s: float) -> None:
        """Adds time to the ranks of which something is missing now."""
        if not self._call.done() and spent_s > 0:
            for rank in self.group.pending_of(self._call).missing:
                self._waits[rank] += spent_s

    def _told(self, error: BaseException | None) -> None:
        if error is None:
            self.end()
        else:
            self.end(failed=str(error))


def _at_end_of_backward(act: Callable[[], None]) -> None:
    """Has something called once the backward pass of this thread has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    # Callbacks run in order. What is queued by one comes behind those that are there by then, such
    # as that of DistributedDataParallel, which waits for its calls.
    engine.queue_callback(lambda: engine.queue_callback(act))
