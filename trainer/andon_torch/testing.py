"""Ranks in one process, for tests: a call ends when all ranks of the group have begun it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from andon.protocol.peer_calls import CallKind
from andon_trainer.core.peer_work import Found, Part, Work

__all__ = ["CallsDiffered", "FakeCall", "FakeRanks"]


class CallsDiffered(RuntimeError):
    """Ranks did not make the same call."""


@dataclass
class FakeCall:
    """A call that a rank began."""

    work: Work
    sender: int | None = None
    error: BaseException | None = None
    ended: bool = False
    _waiting: list[Callable[[BaseException | None], None]] = field(default_factory=list)

    def wait(self, timeout_s: float | None) -> None:
        """Raises what the call ended with.

        Raises:
            TimeoutError: not all ranks have begun it.
        """
        if not self.ended:
            raise TimeoutError(f"{self.work.call}: not all ranks have begun it")
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended

    def then(self, ended: Callable[[BaseException | None], None]) -> None:
        """Has `ended` called once."""
        if self.ended:
            ended(self.error)
        else:
            self._waiting.append(ended)

    def end(self, error: BaseException | None = None) -> None:
        """Ends it."""
        self.error, self.ended = error, True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each(error)


class FakeRanks:
    """The ranks of one group."""

    def __init__(self, size: int) -> None:
        """So many ranks, which have begun nothing."""
        self.size = size
        self.found: list[Found] = []
        """What gates found, and no scaler expected."""
        self._begun: list[deque[FakeCall]] = [deque() for _ in range(size)]
        self._sends: dict[tuple[int, int, int], deque[FakeCall]] = defaultdict(deque)
        self._receives: dict[tuple[int | None, int, int], deque[FakeCall]] = defaultdict(deque)

    def caller(self, rank: int) -> FakeCaller:
        """One rank's way to begin calls."""
        return FakeCaller(self, rank)

    def begin(self, rank: int, work: Work) -> FakeCall:
        """A rank begins a call."""
        call = FakeCall(work)
        if work.call.kind is CallKind.SEND:
            self._begin_send(rank, call)
            return call
        self._begun[rank].append(call)
        if all(self._begun):
            self._run([each.popleft() for each in self._begun])
        return call

    def _begin_send(self, rank: int, call: FakeCall) -> None:
        work, tag = call.work, call.work.call.tag
        if work.receives:
            self._receives[work.peer, rank, tag].append(call)
        else:
            assert work.peer is not None
            self._sends[rank, work.peer, tag].append(call)
        for (source, target, tag), waiting in self._sends.items():
            for key in ((source, target, tag), (None, target, tag)):
                while waiting and self._receives[key]:
                    _hand_over(source, waiting.popleft(), self._receives[key].popleft())

    def _run(self, calls: list[FakeCall]) -> None:
        if len({each.work.call for each in calls}) > 1:
            error = CallsDiffered(" and ".join(str(each.work.call) for each in calls))
            for each in calls:
                each.end(error)
            return
        for each in calls:
            self._pass_gate(each.work)
        for parts in zip(*(each.work.parts for each in calls), strict=True):
            # Copied: a result may lie where another rank's input does.
            given = [tuple(bytearray(view) for view in part.gives) for part in parts]
            for rank, part in enumerate(parts):
                _give(calls[rank].work, rank, part, given)
        for each in calls:
            each.end()

    def _pass_gate(self, work: Work) -> None:
        if work.gate is None:
            return
        for number, part in enumerate(work.parts):
            before = 0
            for view in part.gives:
                bad = work.gate.first_bad(view)
                if bad is not None and not work.gate.expected():
                    self.found.append(work.gate.explain(number, before + bad))
                before += len(view) // work.itemsize


@dataclass(frozen=True, slots=True)
class FakeCaller:
    """One rank's way to begin calls."""

    _of: FakeRanks
    rank: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks."""
        return tuple(range(self._of.size))

    def begin(self, work: Work, *, awaited: bool = False) -> FakeCall:
        """Begins a call."""
        return self._of.begin(self.rank, work)


def _hand_over(source: int, sent: FakeCall, received: FakeCall) -> None:
    error = None
    if sent.work.call == received.work.call:
        received.work.parts[0].takes[0][:] = sent.work.parts[0].gives[0]
        received.sender = source
    else:
        error = CallsDiffered(f"{sent.work.call} and {received.work.call}")
    sent.end(error)
    received.end(error)


def _give(work: Work, rank: int, part: Part, given: list[tuple[bytearray, ...]]) -> None:
    """Gives one rank what is its own of the ranks' inputs."""
    kind, root = work.call.kind, work.call.root
    if kind in (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER):
        own = rank if kind is CallKind.REDUCE_SCATTER else 0
        if part.takes:
            assert work.reduce is not None
            work.reduce(part.takes[0], [memoryview(each[own]) for each in given], last=True)
        return
    if kind is CallKind.SCATTER and root is not None:
        sources = [given[root][rank]]
    elif kind is CallKind.BROADCAST and root is not None:
        sources = [given[root][0]]
    elif kind is CallKind.ALL_TO_ALL:
        sources = [each[rank] for each in given]
    else:
        sources = [each[0] for each in given if each]
    for target, source in zip(part.takes, sources, strict=False):
        target[:] = source
