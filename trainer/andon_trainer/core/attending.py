"""Attending: what a worker that learns does with rounds which it is not on the roster of.

Theory of operation. The line trains on while a worker learns, so this worker is told of rounds that
it can't take up yet: first its state is still on its way, and then its script makes up one step
after the other. What it is told of rounds, numbers and halts waits here, in the order in which it
came. The front of the queue is given out as soon as the worker is where the line was when it said
so. To the rest of the worker, the line then seems to be as far as this worker is.

Everything else (a transfer, the end of the stream) is of the present moment, and passes at once.

A worker that is late on a line with a quorum attends in the same way. Its state is here already,
and what it has computed stays. Between two local steps its script takes a round of the queue whose
record is here, too, and the rest of them once its share is computed.

The queue ends with an assignment that has this worker on its roster: it has arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from andon.protocol.records import Key, RecordKind
from andon_trainer.core.effects import JoinAgain
from andon_trainer.core.events import (
    Assigned,
    Committed,
    Dismissed,
    Event,
    Halted,
    Resumed,
    ScalarAllReduceDone,
    Voided,
)
from andon_trainer.core.waits import Wait
from andon_trainer.core.worker_state import WorkerState

__all__ = ["Attending"]

_OfLine = Assigned | Committed | Voided | ScalarAllReduceDone | Halted | Resumed

# The script does something else than the step that the line made next, and waits for it.
_ELSEWHERE = {
    Wait.NUMBER: "waits for a mean or a gather",
    Wait.EPOCH_END: "has left its epoch",
    Wait.ANSWER: "waits for the answer to a halt",
    Wait.VERDICT: "has found a value that must not count",
}


@dataclass(slots=True)
class Attending:
    """What came of rounds while this worker learns. Empty while it does not."""

    learning: bool = False
    """Whether this worker is not where the line is, as far as it was told."""
    late: bool = False
    """Whether that is because the line went on without it while it computed."""
    _installed: bool = False
    """Whether the state is here that the rounds in the queue go on from."""
    _arrived: bool = False
    """Whether an assignment was given out that has this worker on its roster."""
    ends_run: bool = False
    """Whether this worker was told of the run's last step, so that it lacks nothing."""
    voided: Key | None = None
    """The last round that this worker has heard to be void."""
    dismissed: Dismissed | None = None
    """That the run is over for everybody; it has its turn when nothing is left to make up."""
    _queue: deque[_OfLine] = field(default_factory=deque)

    def begin(self) -> None:
        """This worker is to learn: from now on it is told of rounds."""
        self.end()
        self.learning = True

    def left_out(self, key: Key) -> None:
        """The line goes on without this worker's part of round `key`."""
        # It may not have come to that round yet, nor to those before it that it makes up.
        self._queue = deque(each for each in self._queue if not _assigns(each, key))
        self.learning = self.late = self._installed = True
        self._arrived = False

    def installed(self) -> None:
        """The state is here: what is of older rounds is dropped, once it is at the front."""
        self._installed = True

    def end(self) -> None:
        """This worker learns no more; what waits is dropped."""
        self.learning = self.late = False
        self._installed = self._arrived = self.ends_run = False
        self.dismissed = self.voided = None
        self._queue.clear()

    @property
    def behind(self) -> int:
        """How many committed steps are to be made up, as far as this worker was told."""
        return sum(1 for each in self._queue if _is_step(each))

    def keeps(self, event: Event) -> bool:
        """Takes an event that must wait for its turn; False: it passes at once."""
        # Without the state there is nothing to make up, and nobody sends it any more.
        makes_up = self.ends_run and self._installed
        if makes_up and isinstance(event, Dismissed) and event.stop_reason:
            self.dismissed = event
            return True
        if not self.learning or not isinstance(event, _OfLine):
            return False
        self.voided = _void_by(event) or self.voided
        # Before the state is here, the script waits for weights or for work. A halt pauses that,
        # and a number can only be one that the script gave before.
        if not self._installed and isinstance(event, ScalarAllReduceDone | Halted | Resumed):
            return False
        self.ends_run |= isinstance(event, Committed) and bool(event.stop_reason)
        match event:
            case Voided() if any(_assigns(each, event.key) for each in self._queue):
                # A round that is void before this worker has come to it need not be made up.
                self._queue = deque(each for each in self._queue if not _assigns(each, event.key))
            case Committed(next=Assigned() as following):
                # Two, so that the assignment stays if the record is dropped as an old one.
                self._queue += replace(event, next=None), following
            case _:
                self._queue.append(event)
        return True

    def next(self, state: WorkerState, wait: Wait | None, number: int | None) -> Event | None:
        """Takes the front of the queue, if the worker is there; None: not yet, or there is none.

        Args:
            state: the worker's.
            wait: what its script waits for.
            number: the number that it waits for, if it does.
        """
        while self._installed and self._queue:
            event = self._queue[0]
            if not self._arrived and not _has_come(event, state, wait, number):
                return None
            self._queue.popleft()
            if not self._arrived and _is_past(event, state, wait, number):
                continue
            self._arrived = self._arrived or (isinstance(event, Assigned) and not event.attends)
            if self._arrived and not self._queue:
                self.end()
            return event
        dismissed = self.dismissed if not self._queue else None
        self.dismissed = None if dismissed else self.dismissed
        return dismissed

    def missed(self, head: Key | None) -> Assigned | None:
        """Takes a round from the front of the queue that the others have made; None: there is none.

        `head` is this worker's, which is late.
        """
        if not self.late or self._arrived:
            return None
        while self._queue and _is_old(self._queue[0], head):
            self._queue.popleft()
        work, record = (*self._queue, None, None)[:2]
        if not isinstance(work, Assigned) or not work.attends:
            return None
        if not isinstance(record, Committed) or record.record.key != work.key:
            return None  # It is open, or void.
        self._queue.popleft()
        return work

    def lacks_averages(self, state: WorkerState, wait: Wait | None) -> bool:
        """Whether the others hold what the script waits for: their round is committed.

        It may still be on its way, or they have made no such exchange and it never comes.
        """
        if wait is not Wait.AVERAGES or not self._installed or self._arrived or not self._queue:
            return False
        front = self._queue[0]
        return (
            _is_step(front) and isinstance(front, Committed) and state.head == front.record.parent
        )

    def missing(self) -> JoinAgain:
        """What to do if they are not on their way."""
        front = self._queue[0]
        assert isinstance(front, Committed)
        return _mismatch(
            front.record.key, "waits for averages of an exchange that they did not make"
        )

    def mismatch(
        self, state: WorkerState, wait: Wait | None, number: int | None
    ) -> JoinAgain | None:
        """What to do if the script does something else than the line did; None: it does not.

        It would wait for what never comes, since the line has gone on.
        """
        if not self._installed or self._arrived or not self._queue:
            return None
        front = self._queue[0]
        if isinstance(front, ScalarAllReduceDone):
            awaited = wait is Wait.NUMBER and front.head == state.head and number is not None
            return _mismatch(front.head, "gave fewer numbers") if awaited else None
        if not isinstance(front, Committed) or not _is_step(front) or _is_old(front, state.head):
            return None
        key = front.record.key
        if wait in _ELSEWHERE:
            return _mismatch(key, _ELSEWHERE[wait])
        if wait is Wait.WORK and not state.has_work(key):
            return _mismatch(key, "left that step in the middle")
        return None


def _has_come(event: _OfLine, state: WorkerState, wait: Wait | None, number: int | None) -> bool:
    """Whether the worker is where the line was when it sent `event`."""
    match event:
        case Committed() if _is_step(event) and not _is_old(event, state.head):
            # Rule 8: a record is applied by a worker that holds its averages.
            return state.held_key == event.record.key
        case ScalarAllReduceDone(head=head, sequence=sequence) if head == state.head:
            # Between two waits the script may still give the number.
            if wait is Wait.NUMBER:
                return number is None or sequence <= number
            return wait is not None and wait is not Wait.ANSWER
    return True


def _is_past(event: _OfLine, state: WorkerState, wait: Wait | None, number: int | None) -> bool:
    """Whether the worker has gone on from where the line was when it sent `event`."""
    if isinstance(event, ScalarAllReduceDone):
        # A script that asks for work instead gives no number at this head any more.
        return (event.head, event.sequence, wait) != (state.head, number, Wait.NUMBER)
    return _is_old(event, state.head)


def _is_old(event: _OfLine, head: Key | None) -> bool:
    """Whether an event is of a round that the state has in it, or that was void by then."""
    match event:
        case Committed():
            key = event.record.key
        case Assigned() | Voided():
            key = event.key
        case _:
            return False
    return head is not None and key <= head


def _is_step(event: _OfLine) -> bool:
    return isinstance(event, Committed) and event.record.kind is RecordKind.STEP


def _void_by(event: _OfLine) -> Key | None:
    """The round that is void since the line sent `event`, if one is."""
    match event:
        case Voided(key=key):
            return key
        case Halted(evidence=evidence):
            return evidence.key
    return None


def _assigns(event: _OfLine, key: Key) -> bool:
    return isinstance(event, Assigned) and event.key == key


def _mismatch(key: Key | None, what: str) -> JoinAgain:
    return JoinAgain(
        f"this worker was making up the steps that it has missed, and its script {what} where the "
        f"others' scripts went on to {key}: it begins again with the line's newest state"
    )
