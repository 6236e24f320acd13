"""Every order of events in small groups of ranks: the real cores of calls, lanes, and memory.

A world is what each rank calls, in its order. Moves are: a rank makes its next call; a lane's
thread sends what is first in its queue; a lane delivers its first frame, of a piece the head, then
the bytes; a copy or a reduction is made. Limits are a few bytes, so that stages, pieces and eager
parts are all there in tensors of a few elements. A state is reached again by making its moves
again: cores hold views of memory, which can't be copied.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from andon.protocol import peer_calls
from andon.protocol.peer_calls import Call, CallKind
from andon.protocol.peer_frames import Begin, LaneEnd, Piece
from andon_trainer.core import collectives, group_calls, peer_effects, peer_flow, send_calls
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_effects import (
    EndCall,
    Opening,
    PeerEffect,
    PlaceKept,
    ReportFault,
    RunMakes,
    SendBegin,
    SendPiece,
)
from andon_trainer.core.peer_flow import MakeSome, PeerViolation, row_of
from andon_trainer.core.peer_plan import Buffer, Places, Plan, Span
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.core.send_calls import SendCalls

__all__ = ["Move", "PeerReport", "PeerWorld", "Story", "small_limits", "stories_of", "walks_of"]

EAGER, AHEAD = 8, 2
ITEM = 4

Move = tuple[Any, ...]
Wanted = list[float] | None


class Wrong(Exception):
    """A state that must not be."""


@dataclass(frozen=True)
class Story:
    """One call as a script makes it."""

    kind: CallKind
    count: int = 1
    root: int = 0
    peer: int | None = None
    receives: bool = False
    tag: int = 0
    in_place: bool = False
    dtype: str = "float32"
    """What the call says; elements are float32."""


@dataclass(frozen=True)
class PeerWorld:
    """What each rank calls, in order."""

    name: str
    scripts: tuple[tuple[Story, ...], ...]
    differs: bool = False
    """Whether some rank calls something else than the others."""
    leaves: bool = False
    """Whether ranks say that they leave."""
    left_behind: bool = False
    """Whether one of them is needed then."""


def small_limits(patch: pytest.MonkeyPatch) -> None:
    """Limits of a few bytes. Plans are cached, and must be made anew, also afterwards."""
    collectives.plan_of.cache_clear()
    patch.setattr(peer_calls, "SEGMENT_MULTIPLE", 1)
    patch.setattr(collectives, "EAGER_BYTES", EAGER)
    patch.setattr(collectives, "_DIRECT_BYTES", 2 * EAGER)
    patch.setattr(peer_effects, "EAGER_BYTES", EAGER)
    patch.setattr(peer_flow, "EAGER_BYTES", EAGER)
    patch.setattr(peer_flow, "START_BYTES", 2 * EAGER)
    patch.setattr(peer_flow, "LEAST_START_BYTES", 1)
    patch.setattr(peer_flow, "PIECE_BYTES", EAGER)
    patch.setattr(peer_flow, "LEAST_BYTES", 1)
    patch.setattr(peer_flow, "WINDOW_BYTES", EAGER)
    for module in (group_calls, send_calls):
        patch.setattr(module, "MAX_AHEAD", AHEAD)


def reduced(out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> None:
    """The sum."""
    del last
    acc = np.frombuffer(inputs[0], np.float32).copy()
    for each in inputs[1:]:
        acc += np.frombuffer(each, np.float32)
    np.frombuffer(out, np.float32)[:] = acc


@dataclass(eq=False)
class _Made:
    """A call that a rank has made."""

    story: Story
    index: int
    """Its place in the rank's script."""
    work: Work
    wanted: Callable[[int | None], Wanted]
    opening: Opening | None = None
    ends: int = 0
    scratch: memoryview | None = None

    def view(self, span: Span) -> memoryview:
        if span.buffer is Buffer.SCRATCH:
            if self.scratch is None:
                assert self.opening is not None
                assert self.opening.flow is not None
                self.scratch = memoryview(bytearray(self.opening.flow.plan.scratch_bytes))
            return self.scratch[span.start : span.stop]
        part = self.work.parts[span.part]
        views = part.gives if span.buffer is Buffer.GIVES else part.takes
        return views[span.index][span.start : span.stop]


@dataclass(eq=False)
class _Rank:
    collectives: GroupCalls
    sends: SendCalls
    made: list[_Made] = field(default_factory=list)
    makes: list[tuple[_Made, MakeSome]] = field(default_factory=list)
    ended: bool = False
    """Whether it has said that it leaves."""


Frame = Begin | Piece | LaneEnd


@dataclass(eq=False)
class Running:
    """A world in one state."""

    world: PeerWorld
    ranks: list[_Rank]
    queues: dict[tuple[int, int], deque[Any]]
    """By lane: what its thread has to send."""
    wires: dict[tuple[int, int], deque[tuple[Frame, bytes]]]
    """By lane: what is under way."""
    landing: dict[tuple[int, int], bool]
    """By lane: a piece whose head has come, and whether it is to be kept."""
    heard: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Begins that came: receiver, sender, group, number."""
    faults: list[ReportFault] = field(default_factory=list)
    received: dict[tuple[int, int], int] = field(default_factory=dict)
    """By sender and number: how often a SEND was received."""

    # ------------------------------------------------------------------ moves

    def moves(self) -> Iterator[Move]:
        """What can happen next."""
        if self.faults:
            return
        for r, rank in enumerate(self.ranks):
            script = self.world.scripts[r]
            if len(rank.made) < len(script):
                yield ("call", r)
            elif self.world.leaves and not rank.ended and all(m.ends for m in rank.made):
                yield ("leave", r)
            for index in range(len(rank.makes)):
                yield ("make", r, index)
        for lane, queue in self.queues.items():
            if queue:
                yield ("send", *lane)
        for lane, wire in self.wires.items():
            if wire:
                yield ("deliver", *lane)

    def play(self, move: Move) -> None:
        """Makes a move.

        Raises:
            Wrong: it leads to a state that must not be.
        """
        try:
            getattr(self, f"_{move[0]}")(*move[1:])
        except PeerViolation as violation:
            raise Wrong(f"an honest rank is accused: {violation}") from None
        except AssertionError as error:
            raise Wrong(f"an assertion fails: {error}") from None
        self._check()

    def _call(self, r: int) -> None:
        rank = self.ranks[r]
        made = _made(self.world, r, len(rank.made))
        rank.made.append(made)
        core = rank.sends if made.story.kind is CallKind.SEND else rank.collectives
        made.opening, effects = core.begin(made.work)
        self._act(r, core, effects)

    def _leave(self, r: int) -> None:
        self.ranks[r].ended = True
        for lane, queue in self.queues.items():
            if lane[0] == r:
                queue.append(LaneEnd())

    def _make(self, r: int, index: int) -> None:
        rank = self.ranks[r]
        made, some = rank.makes.pop(index)
        assert made.opening is not None
        assert made.opening.flow is not None
        make = made.opening.flow.plan.stages[some.stage].makes[some.make]
        inputs = [made.view(each.within(some.start, some.stop)) for each in make.inputs]
        out = made.view(make.out.within(some.start, some.stop))
        if make.reduces:
            reduced(out, inputs, last=make.last)
        else:
            out[:] = bytes(inputs[0])
        core = rank.collectives
        self._act(r, core, core.made(made.opening, some.stage, some.make, some.stop))

    def _send(self, a: int, b: int) -> None:
        item = self.queues[a, b].popleft()
        if not isinstance(item, tuple):
            self.wires[a, b].append((item, b""))
            return
        core, made, give = item
        opening = made.opening
        transfer = opening.flow.plan.stages[give.stage].gives[give.give]
        spans = row_of(transfer.spans, give.start, give.stop)
        data = b"".join(bytes(made.view(span)) for span in spans)
        piece = Piece(core.group, opening.number, give.stage, give.start, len(data))
        self._require_begun(a, b, piece)
        self.wires[a, b].append((piece, data))
        self._act(a, core, core.left(opening, give.stage, give.give, give.stop))

    def _deliver(self, a: int, b: int) -> None:
        frame, data = self.wires[a, b][0]
        rank = self.ranks[b]
        if isinstance(frame, LaneEnd):
            self.wires[a, b].popleft()
            for core in (rank.collectives, rank.sends):
                self._act(b, core, core.gone(a))
            return
        core = rank.collectives if frame.group == rank.collectives.group else rank.sends
        if isinstance(frame, Begin):
            self.wires[a, b].popleft()
            self.heard.add((b, a, frame.group, frame.sequence))
            self._act(b, core, core.begun(a, frame))
            return
        if (a, b) not in self.landing:
            found = core.landing(a, frame)
            self.landing[a, b] = found is None
            if found is not None:
                made = self._of(b, found[0])
                for span in found[1]:
                    view = made.view(span)
                    view[:], data = data[: view.nbytes], data[view.nbytes :]
            return
        self.wires[a, b].popleft()
        kept = memoryview(data) if self.landing.pop((a, b)) else None
        self._act(b, core, core.landed(a, frame, kept))

    # ------------------------------------------------------------------ effects

    def _act(self, r: int, core: GroupCalls | SendCalls, effects: list[PeerEffect]) -> None:
        todo, rank = deque(effects), self.ranks[r]
        while todo:
            effect = todo.popleft()
            if isinstance(effect, SendBegin):
                call = effect.call
                begin = Begin(
                    *(core.group, call.number, call.work.call, r, effect.gives_bytes),
                    receives=call.work.receives,
                )
                self.queues[r, effect.peer].append(begin)
            elif isinstance(effect, SendPiece):
                item = (core, self._of(r, effect.call), effect.give)
                self.queues[r, effect.give.peer].append(item)
            elif isinstance(effect, PlaceKept):
                at, made = 0, self._of(r, effect.call)
                for span in effect.spans:
                    made.view(span)[:] = effect.kept[at : at + span.size]
                    at += span.size
                todo += core.placed(effect.call, effect.stage, effect.peer, effect.upto)
            elif isinstance(effect, RunMakes):
                made = self._of(r, effect.call)
                rank.makes += [(made, each) for each in effect.makes]
            elif isinstance(effect, EndCall):
                self._end(r, self._of(r, effect.call))
            else:
                assert isinstance(effect, ReportFault), effect
                self.faults.append(effect)

    def _of(self, r: int, opening: Opening) -> _Made:
        return next(each for each in self.ranks[r].made if each.opening is opening)

    # ------------------------------------------------------------------ what must hold

    def _require_begun(self, a: int, b: int, piece: Piece) -> None:
        if (a, b, piece.group, piece.sequence) in self.heard:
            return
        upto = piece.offset + piece.length
        if piece.stage or upto > EAGER:
            raise Wrong(f"rank {a} gives {upto} bytes to rank {b}, which has not begun the call")

    def _end(self, r: int, made: _Made) -> None:
        made.ends += 1
        if made.ends > 1:
            raise Wrong(f"{made.story} ended twice at rank {r}")
        opening = made.opening
        assert opening is not None
        if made.story.kind is CallKind.SEND and made.story.receives:
            assert opening.peer is not None
            key = (opening.peer, opening.number)
            self.received[key] = self.received.get(key, 0) + 1
            if self.received[key] > 1:
                raise Wrong(f"SEND {opening.number} of rank {opening.peer} was received twice")
        takes = [each for part in made.work.parts for each in part.takes]
        if takes and made.story.kind is not CallKind.SEND and self._differs(made.index):
            raise Wrong(f"rank {r} has a result of {made.story}, though calls differ")
        wanted = made.wanted(opening.number)
        found = [float(x) for each in takes for x in np.frombuffer(each, np.float32)]
        if wanted is not None and found != wanted:
            raise Wrong(f"rank {r} has {found} of {made.story}, and should have {wanted}")

    def _differs(self, index: int) -> bool:
        made = {s[index] for s in self.world.scripts if len(s) > index}
        return len({(each.kind, each.count, each.root, each.dtype) for each in made}) > 1

    def _check(self) -> None:
        for fault in self.faults:
            if not (self.world.differs or self.world.left_behind):
                raise Wrong(f"ranks that make the same calls are told: {fault.message}")
        for r, rank in enumerate(self.ranks):
            early = [e for by in rank.collectives._early.values() for e in by.values()]
            early += [e for _, e in rank.sends._came]
            kept = sum(len(each.kept) for each in early)
            if kept > 2 * AHEAD * EAGER * (len(self.ranks) - 1):
                raise Wrong(f"rank {r} keeps {kept} bytes for calls that it has not made")

    def check_end(self) -> None:
        """What must hold where nothing can happen any more.

        Raises:
            Wrong: it does not.
        """
        if self.faults:
            return
        if self.world.differs or self.world.left_behind:
            raise Wrong("nobody found that calls differ, or that a rank left")
        for r, rank in enumerate(self.ranks):
            for made in rank.made:
                if not made.ends:
                    raise Wrong(f"{made.story} of rank {r} is stuck")

    def key(self) -> object:
        """Equal for states that are the same."""
        return (
            tuple(
                (
                    _plain(rank.collectives),
                    _plain(rank.sends),
                    rank.ended,
                    tuple(sorted((m.index, s.stage, s.make, s.start) for m, s in rank.makes)),
                    tuple((made.ends, _memory_of(made)) for made in rank.made),
                )
                for rank in self.ranks
            ),
            tuple(
                tuple(
                    each if not isinstance(each, tuple) else (each[1].index, each[2])
                    for each in queue
                )
                for queue in self.queues.values()
            ),
            tuple(tuple(wire) for wire in self.wires.values()),
            tuple(sorted(self.landing.items())),
            tuple(sorted(self.received.items())),
        )


def start(world: PeerWorld) -> Running:
    """The first state."""
    n = len(world.scripts)
    places = Places(tuple((rank,) for rank in range(n)))
    ranks = [
        _Rank(
            GroupCalls(group=1, places=places, rank=rank),
            SendCalls(group=2, places=places, rank=rank),
        )
        for rank in range(n)
    ]
    lanes = [(a, b) for a in range(n) for b in range(n) if a != b]
    return Running(
        world, ranks, {lane: deque() for lane in lanes}, {lane: deque() for lane in lanes}, {}
    )


@dataclass
class PeerReport:
    """What a search saw."""

    states: int
    ends: int
    """States in which nothing can happen any more."""
    complete: bool
    wrong: str = ""
    way: tuple[Move, ...] = ()


def stories_of(world: PeerWorld, states: int = 10**9) -> PeerReport:
    """Visits every state of a world, nearest first, or the nearest `states` of them."""
    seen: set[int] = set()
    todo: deque[tuple[Move, ...]] = deque([()])
    ends = 0
    while todo:
        way = todo.popleft()
        running = start(world)
        try:
            for move in way:
                running.play(move)
            key = hash(running.key())
            if key in seen:
                continue
            seen.add(key)
            moves = list(running.moves())
            if not moves:
                ends += 1
                running.check_end()
        except Wrong as wrong:
            return PeerReport(len(seen), ends, complete=False, wrong=str(wrong), way=way)
        if len(seen) >= states:
            return PeerReport(len(seen), ends, complete=False)
        todo += [(*way, move) for move in moves]
    return PeerReport(len(seen), ends, complete=True)


def walks_of(world: PeerWorld, walks: int, seed: int = 1) -> PeerReport:
    """Goes random ways to their ends: further than a search that is bounded."""
    step = random.Random(seed)
    report = PeerReport(0, 0, complete=False)
    for _ in range(walks):
        running, way = start(world), list[Move]()
        try:
            while moves := list(running.moves()):
                way.append(step.choice(moves))
                running.play(way[-1])
                report.states += 1
            report.ends += 1
            running.check_end()
        except Wrong as wrong:
            report.wrong, report.way = str(wrong), tuple(way)
            return report
    return report


def _made(world: PeerWorld, r: int, index: int) -> _Made:
    story, n = world.scripts[r][index], len(world.scripts)
    rng = [_values(world, rank, index, story) for rank in range(n)]
    mine = rng[r].copy()
    room = np.full(story.count, np.nan, np.float32)
    kind = story.kind
    if kind is CallKind.SEND:
        call = Call(kind=kind, dtype="float32", count=story.count, tag=story.tag)
        part = Part((), (_bytes(room),)) if story.receives else Part((_bytes(mine),))
        work = Work(
            call=call, itemsize=ITEM, parts=(part,), peer=story.peer, receives=story.receives
        )
        return _Made(story, index, work, lambda _: None)
    call = Call(
        kind=kind,
        dtype="" if kind is CallKind.BARRIER else story.dtype,
        count=0 if kind is CallKind.BARRIER else story.count,
        reduction="sum" if kind.reduces else "",
        root=story.root if kind.has_root else None,
    )
    wanted: Wanted = None
    parts: tuple[Part, ...] = ()
    if kind is CallKind.ALL_REDUCE:
        takes = mine if story.in_place else room
        parts = (Part((_bytes(mine),), (_bytes(takes),)),)
        total = rng[0].copy()
        for each in rng[1:]:
            total = total + each
        wanted = [float(x) for x in total]
    elif kind is CallKind.BROADCAST:
        at_root = r == story.root
        parts = (Part((_bytes(mine),)) if at_root else Part((), (_bytes(room),)),)
        wanted = [] if at_root else [float(x) for x in rng[story.root]]
    elif kind is CallKind.GATHER:
        rooms = [np.full(story.count, np.nan, np.float32) for _ in range(n)]
        at_root = r == story.root
        parts = (Part((_bytes(mine),), tuple(map(_bytes, rooms)) if at_root else ()),)
        wanted = [float(x) for each in rng for x in each] if at_root else []
    work = Work(call=call, itemsize=ITEM, parts=parts, reduce=reduced)
    return _Made(story, index, work, lambda _: wanted)


def _values(world: PeerWorld, rank: int, index: int, story: Story) -> Any:
    del world
    return np.arange(story.count, dtype=np.float32) + np.float32(100 * rank + 10 * index + 1)


def _bytes(array: Any) -> memoryview:
    return memoryview(array.view(np.uint8).data)


def _memory_of(made: _Made) -> bytes:
    parts = [bytes(v) for part in made.work.parts for v in (*part.gives, *part.takes)]
    return b"".join([*parts, bytes(made.scratch or b"")])


def _plain(value: object) -> object:
    """A value that is equal and hashable wherever the state is the same."""
    if isinstance(value, Plan | Work | Places | enum.Enum | int | str | bytes | type(None)):
        return None if isinstance(value, Plan | Work | Places) else value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return tuple(_plain(getattr(value, each.name)) for each in fields)
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, list | tuple | deque):
        return tuple(_plain(each) for each in value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{type(value)} in a core")
