"""Small worlds of sessions: the core, its journal, and processes whose streams carry messages.

A state is the core, what is on its way on each stream in both directions, what the journal has not
written yet, and what each process knows. Moves deliver one message, write one change, or let
something fail: a process dies, accuses another one, or the coordinator dies and comes back from its
journal. Every state that can be reached is looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon.protocol.sessions import GRACE_S, RankFault, RankReport, SessionEnd, SessionOver
from andon_coordinator.core import session_events as on
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.events import SessionSaved, TimePassed
from andon_coordinator.core.sessions import SessionsCore
from search.copying import copied

__all__ = ["Forbidden", "World", "search"]

MakeCore = Callable[[int, int], SessionsCore]
"""A core in a term, after so many sessions."""


class Forbidden(AssertionError):
    """What must never happen, happened."""


def make_core(term: int, formed: int) -> SessionsCore:
    """The core under test."""
    return SessionsCore(keys=Keys(term, _no_bits), formed=formed)


def _no_bits() -> int:
    return 0


@dataclass
class _Rank:
    """One rank's process, as far as it knows."""

    number: int
    started: int = 0
    """How many processes the rank has had."""
    alive: bool = True
    stream: int = 0
    """0: it has not attended."""
    session: Key | None = None
    over: SessionOver | None = None
    left: bool = False


@dataclass
class World:
    """A state, which moves change in place."""

    make: MakeCore = make_core
    size: int = 2
    kills: int = 1
    faults: int = 1
    crashes: int = 1
    restarts: int = 1
    attempts: int = 4
    """How often processes attend, all together: a rank that is refused tries again."""
    term: int = 1
    now: float = 0.0
    streams: int = 0
    ranks: list[_Rank] = field(default_factory=list)
    up: dict[int, list[on.SessionEvent]] = field(default_factory=dict)
    """What is on its way to the coordinator, by stream."""
    down: dict[int, list[on.SendFormed | on.SendOver]] = field(default_factory=dict)
    unwritten: list[on.SaveSession | on.SaveSessionEnd] = field(default_factory=list)
    durable: dict[Key, SessionOver | None] = field(default_factory=dict)
    drawn: list[Key] = field(default_factory=list)
    verdicts: dict[Key, SessionOver] = field(default_factory=dict)
    formed: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """The streams to which each key was named."""
    gone: set[int] = field(default_factory=set)
    """Streams whose process died, or said that it failed."""

    def __post_init__(self) -> None:
        """All processes have just started."""
        self.core = self.make(self.term, 0)
        self.ranks = [_Rank(number) for number in range(self.size)]

    # --------------------------------------------------------------------------------- moves

    def moves(self) -> Iterator[tuple[str, int]]:
        """Everything that can happen now."""
        for rank in self.ranks:
            yield from self._moves_of(rank)
        for stream, waiting in self.up.items():
            if waiting:
                yield "hear", stream
        if self.unwritten:
            yield "write", 0
        if self.core.live is not None and self.core.live.accusation is not None:
            yield "wait", 0
        if self.crashes:
            yield "crash", 0

    def _moves_of(self, rank: _Rank) -> Iterator[tuple[str, int]]:
        n = rank.number
        ended = rank.over is not None or rank.left or not rank.alive
        if rank.alive and not rank.stream and self.attempts:
            yield "attend", n
        if rank.alive and rank.session is not None and not ended:
            yield "leave", n
            if self.faults:
                yield "accuse", n
                yield "fail", n
        if rank.alive and rank.stream and not rank.left and self.kills:
            yield "kill", n
        if ended and self.restarts:
            yield "restart", n
        if rank.alive and self.down.get(rank.stream):
            yield "read", n

    def move(self, what: str, who: int) -> None:
        """Lets it happen."""
        getattr(self, f"_{what}")(who)

    def _attend(self, n: int) -> None:
        rank = self.ranks[n]
        self.attempts -= 1
        self.streams += 1
        rank.stream = self.streams
        request = on.AttendRequest(rank=n, world_size=self.size, incarnation=self.streams)
        self.up[rank.stream] = [on.RankAttended(rank.stream, request)]
        self.down[rank.stream] = []

    def _leave(self, n: int) -> None:
        rank = self.ranks[n]
        rank.left = True
        self._send(rank, on.RankLeft(rank.stream, rank.session, done=True))

    def _accuse(self, n: int) -> None:
        self.faults -= 1
        self._fault(n, SessionEnd.RANK_LEFT, (n + 1) % self.size)

    def _fail(self, n: int) -> None:
        self.faults -= 1
        self.gone.add(self.ranks[n].stream)
        self._fault(n, SessionEnd.SCRIPT_FAILED, n)

    def _fault(self, n: int, end: SessionEnd, culprit: int) -> None:
        rank = self.ranks[n]
        fault = RankFault(end=end, culprit=culprit, message="")
        self._send(rank, on.RankFaulted(rank.stream, rank.session, fault))

    def _kill(self, n: int) -> None:
        rank = self.ranks[n]
        self.kills -= 1
        rank.alive = False
        self.gone.add(rank.stream)
        self._send(rank, on.RankStreamEnded(rank.stream))

    def _restart(self, n: int) -> None:
        self.restarts -= 1
        rank = self.ranks[n]
        if rank.alive and not rank.left:
            self._send(rank, on.RankStreamEnded(rank.stream))
        self.ranks[n] = _Rank(n, started=rank.started + 1)

    def _read(self, n: int) -> None:
        rank = self.ranks[n]
        message = self.down[rank.stream].pop(0)
        if isinstance(message, on.SendFormed):
            rank.session = message.key
            return
        if message.over.key != rank.session:
            raise Forbidden(f"rank {n} of {rank.session} hears of the end of {message.over.key}")
        rank.over = message.over

    def _send(self, rank: _Rank, event: on.SessionEvent) -> None:
        if rank.stream in self.up:
            self.up[rank.stream].append(event)

    def _hear(self, stream: int) -> None:
        event = self.up[stream].pop(0)
        self._receive(event)
        if isinstance(event, on.RankStreamEnded):
            del self.up[stream]

    def _wait(self, _: int) -> None:
        self.now += GRACE_S
        # Everybody who lives reports meanwhile.
        for rank in self.ranks:
            if rank.alive and rank.session is not None and rank.over is None:
                self._receive(on.RankReported(rank.stream, rank.session, 1, RankReport()))
        self._receive(TimePassed())

    def _write(self, _: int) -> None:
        effect = self.unwritten.pop(0)
        if isinstance(effect, on.SaveSession):
            self.durable[effect.key] = None
            self._receive(SessionSaved(effect.key))
        elif self.durable.get(effect.key) is None:
            self.durable[effect.key] = effect.over

    def _crash(self, _: int) -> None:
        self.crashes -= 1
        self.term += 1
        self.unwritten.clear()
        self.core = self.make(self.term, len(self.durable))
        for rank in self.ranks:
            self.down.pop(rank.stream, None)
            self.up.pop(rank.stream, None)
            if rank.alive and rank.session is not None and rank.over is None and not rank.left:
                lost = SessionEnd.SERVICE_LEAVING
                rank.over = SessionOver(
                    key=rank.session, end=lost, culprit=None, culprit_node="", message=""
                )
            elif rank.session is None:
                rank.stream = 0  # It tries again.
        self.up.clear()
        self.down.clear()

    # ------------------------------------------------------------------------------- the core

    def _receive(self, event: on.SessionEvent) -> None:
        for effect in self.core.receive(event, self.now):
            self._do(effect)

    def _do(self, effect: on.SessionEffect) -> None:
        match effect:
            case on.SaveSession(key):
                if any(key <= each for each in self.drawn):
                    raise Forbidden(f"key {key} is drawn after {self.drawn[-1]}")
                self.drawn.append(key)
                self.unwritten.append(effect)
            case on.SaveSessionEnd():
                self.unwritten.append(effect)
            case on.SendFormed(key=key, stream=stream):
                if key not in self.durable:
                    raise Forbidden(f"key {key} is named before it is durable")
                self.formed[key] = (*self.formed.get(key, ()), stream)
                self.down[stream].append(effect)
            case on.RefuseAttendance(stream) | on.CloseAttendance(stream):
                self._try_again(stream)
            case on.SendOver(stream, over):
                self._judge(over)
                if stream in self.down:
                    self.down[stream].append(effect)

    def _try_again(self, stream: int) -> None:
        for rank in self.ranks:
            if rank.stream == stream and rank.session is None and rank.over is None:
                rank.stream = 0

    def _judge(self, over: SessionOver) -> None:
        assert over.key is not None
        first = self.verdicts.setdefault(over.key, over)
        if first != over:
            raise Forbidden(f"session {over.key} has two ends: {first.end} and {over.end}")
        if over.end in (SessionEnd.RANK_LOST, SessionEnd.SCRIPT_FAILED):
            assert over.culprit is not None
            if not self.gone & set(self.formed[over.key]):
                raise Forbidden(f"rank {over.culprit} of {over.key} is blamed, and nobody died")

    def check(self) -> None:
        """Looks at a state in which nothing is on its way."""
        if any(self.up.values()) or any(self.down.values()) or self.unwritten:
            return
        waiting = [each for each in self.ranks if each.alive and each.stream and not each.session]
        if len(waiting) == self.size:
            raise Forbidden("all ranks wait, and there is no session")
        for key, streams in self.formed.items():
            there = [each for each in self.ranks if each.session == key and not each.left]
            hangs = [each for each in there if each.alive and each.over is None]
            if hangs and self.gone & set(streams):
                raise Forbidden(f"rank {hangs[0].number} of {key} was not told that it is over")

    def fingerprint(self) -> str:
        """Equal for two states only if they are the same one."""
        core = self.core
        shown = (
            *(self.ranks, self.up, self.down, self.unwritten, self.durable, self.gone),
            *(self.kills, self.faults, self.crashes, self.restarts, self.term, self.verdicts),
            *(core.waiting, core.live, core._forming, core._keys._round),
        )
        return repr(shown)


def search(world: World, *, most: int = 100_000) -> int:
    """Looks at every state that can be reached; how many there are.

    Raises:
        Forbidden: one of them must never be; its notes are the way that leads there.
    """
    seen = {world.fingerprint()}
    queue: deque[tuple[World, tuple[str, ...]]] = deque([(world, ())])
    while queue:
        here, way = queue.popleft()
        for what, who in list(here.moves()):
            there, steps = copied(here), (*way, f"{what} {who}")
            try:
                there.move(what, who)
                there.check()
            except AssertionError as error:
                error.add_note(", ".join(steps))
                raise
            mark = there.fingerprint()
            if mark not in seen:
                seen.add(mark)
                assert len(seen) <= most, f"more than {most} states"
                queue.append((there, steps))
    return len(seen)
