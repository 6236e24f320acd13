"""Collectives through the memory that neighbours share: which passes each kind makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from andon.protocol.peer_calls import SEGMENT_MULTIPLE, CallKind, cut
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.peers.memory import NeighbourMemory, Still
from andon_trainer.peers.memory_passes import NotFinite, Passes, Row, Shape, size_of, span, views_of

__all__ = ["SMALL_BYTES", "NotFinite", "StageRows", "run", "transfer"]

SMALL_BYTES = 64 * 2**10
"""Up to this size each rank reduces all of an input itself."""


def run(memory: NeighbourMemory, work: Work, sequence: int, still: Still) -> None:
    """Makes a call whose ranks are all neighbours. Its ranks are their places.

    Args:
        memory: the group's, opened.
        work: the call; not a SEND.
        sequence: its number in the group.
        still: called while others are waited for.

    Raises:
        CallDiffers: a neighbour made another call.
        NotFinite: a value of the input, or of a sum, is not finite.
        NeighbourLeft: a neighbour left.
        Exception: what `still` raised.
    """
    _Run(memory, work, sequence, still).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRows:
    """What neighbours give each other in one stage of a call that has ranks elsewhere, too."""

    number: int
    """The stage's, in the call."""
    gives: Sequence[Row]
    """By place, what that neighbour gets."""
    takes: Sequence[Row]
    """By place, where what it gives is put."""
    ready: Callable[[int, int], None]
    """Called before the bytes `start` to `stop` of all rows are given; waits until they are there.

    A row may be shorter. It may raise, to end the call.
    """
    passed: Callable[[int, int], None]
    """Called once these bytes were given to all, and those of all are here."""


def transfer(
    memory: NeighbourMemory, work: Work, sequence: int, rows: StageRows, still: Still
) -> None:
    """Makes one stage of a call that has ranks elsewhere, too.

    All neighbours make it, if one of them gives something to another.

    Args:
        memory: the group's, opened.
        work: the call.
        sequence: its number in the group.
        rows: what is given, and where to.
        still: called while others are waited for.

    Raises:
        As `run`, but nothing is looked at: not NotFinite.
        Exception: what `rows.ready` raised.
    """
    made = _Run(memory, replace(work, gate=None), sequence, still)
    made.number = rows.number
    made.exchange(rows.gives, rows.takes, rows.ready, rows.passed)


def _at_once(start: int, stop: int) -> None:
    """All bytes are there, and nobody waits for them."""
    del start, stop


class _Run(Passes):
    """One call, or one stage of it."""

    def run(self) -> None:
        """Makes the call."""
        kind = self._work.call.kind
        if kind is CallKind.BARRIER:
            shape = Shape(gives=[0] * self._count, room=1)
            self._pass(shape, lambda _, __: None, lambda _, __: None)
        how = {
            CallKind.ALL_REDUCE: self._all_reduce,
            CallKind.REDUCE: self._reduce,
            CallKind.REDUCE_SCATTER: self._reduce_scatter,
            CallKind.ALL_GATHER: self._all_gather,
            CallKind.GATHER: self._gather,
            CallKind.SCATTER: self._scatter,
            CallKind.BROADCAST: self._broadcast,
            CallKind.ALL_TO_ALL: self._all_to_all,
        }
        for part in self._work.parts:
            how[kind](part)
            self.number += 1

    # The kinds.

    def _all_reduce(self, part: Part) -> None:
        [give], [take] = part.gives, part.takes
        if self._sums:
            self._sum(give, take)
        elif len(give) <= min(SMALL_BYTES, self._memory.slot_bytes):
            self._reduce_to(give, take)
        else:
            self._reduce_by_windows(give, take)

    def _reduce(self, part: Part) -> None:
        takes = part.takes if self._me == self._work.call.root else ()
        self._reduce_to(part.gives[0], takes[0] if takes else None)

    def _reduce_scatter(self, part: Part) -> None:
        room = self._room_each()
        [take] = part.takes

        def put(number: int, slot: memoryview) -> None:
            self._put_each([(each,) for each in part.gives], number, slot, room)

        def use(number: int, shared: int) -> None:
            start, stop = span(number, room, len(take))
            inputs = [self._piece(place, shared, room, stop - start) for place in self._places()]
            inputs[self._me] = part.gives[self._me][start:stop]
            self._make(take[start:stop], inputs, start)

        self._check(part.gives[self._me], sum(map(len, part.gives[: self._me])))
        gives, takes = [len(each) for each in part.gives], [len(take)] * self._count
        self._pass(Shape(gives=gives, room=room, takes=takes), put, use)

    def _all_gather(self, part: Part) -> None:
        [give] = part.gives
        self._share(give, part.takes)

    def _gather(self, part: Part) -> None:
        [give] = part.gives
        self._share(give, part.takes if self._me == self._work.call.root else None)

    def _broadcast(self, part: Part) -> None:
        root = self._work.call.root
        assert root is not None
        mine = self._me == root
        nothing = memoryview(bytearray())
        takes = [nothing] * self._count
        if not mine:
            takes[root] = part.takes[0]
        self._share(part.gives[0] if mine else nothing, takes)

    def _scatter(self, part: Part) -> None:
        root = self._work.call.root
        nothing = memoryview(bytearray())
        takes = [part.takes[0] if place == root else nothing for place in self._places()]
        self._give_each(part.gives if self._me == root else [nothing] * self._count, takes)

    def _all_to_all(self, part: Part) -> None:
        self._give_each(part.gives, part.takes)

    # What they are made of.

    def _give_each(self, gives: Sequence[memoryview], takes: Sequence[memoryview]) -> None:
        self._check(gives[self._me], sum(map(len, gives[: self._me])))
        self.exchange([(each,) for each in gives], [(each,) for each in takes])
        self._c.copy(takes[self._me], gives[self._me])

    def _share(self, give: memoryview, takes: Sequence[memoryview] | None) -> None:
        """Each rank gives the same to all others; None: this rank takes nothing."""
        room = self._memory.slot_bytes
        expected = None if takes is None else [len(each) for each in takes]

        def put(number: int, slot: memoryview) -> None:
            start, stop = span(number, room, len(give))
            self._put(slot[: stop - start], give[start:stop], start)

        def use(number: int, shared: int) -> None:
            if takes is None:
                return
            for place in self._others():
                start, stop = span(number, room, len(takes[place]))
                slot = self._memory.slot(place, shared)
                self._c.copy(takes[place][start:stop], slot[: stop - start])

        self._pass(Shape(gives=[len(give)] * self._count, room=room, takes=expected), put, use)
        if takes is not None and len(takes[self._me]):
            self._c.copy(takes[self._me], give)

    def exchange(
        self,
        gives: Sequence[Row],
        takes: Sequence[Row],
        ready: Callable[[int, int], None] = _at_once,
        passed: Callable[[int, int], None] = _at_once,
    ) -> None:
        """Each rank gives something else to each other one; see `StageRows`."""
        room = self._room_each()

        def put(number: int, slot: memoryview) -> None:
            ready(number * room, (number + 1) * room)
            self._put_each(gives, number, slot, room)

        def use(number: int, shared: int) -> None:
            for place in self._others():
                start, stop = span(number, room, size_of(takes[place]))
                piece = self._piece(place, shared, room, stop - start)
                for at, view in views_of(takes[place], start, stop):
                    self._c.copy(view, piece[at : at + len(view)])
            passed(number * room, (number + 1) * room)

        given, expected = [size_of(each) for each in gives], [size_of(each) for each in takes]
        self._pass(Shape(gives=given, room=room, takes=expected), put, use)

    def _sum(self, give: memoryview, take: memoryview) -> None:
        """A sum of float32: one compiled loop over all parts."""
        memory = self._memory
        mine = self._announcement([len(give)] * self._count)
        at, size = memory.announce(self._still, mine)
        found = self._found if self._gated else None
        differs, memory.part = self._c.all_reduce(
            memory.files,
            self._me,
            memory.still,
            memory.part,
            at,
            size,
            take,
            give,
            self._divisor,
            found,
        )
        if differs >= 0:
            memory.announcements(at, mine)

    def _reduce_to(self, give: memoryview, take: memoryview | None) -> None:
        """Each rank gives its whole input, and who wants the result reduces all of it."""
        room = self._memory.slot_bytes

        def put(number: int, slot: memoryview) -> None:
            start, stop = span(number, room, len(give))
            self._put(slot[: stop - start], give[start:stop], start)

        def use(number: int, shared: int) -> None:
            start, stop = span(number, room, len(give))
            if take is not None:
                slots = [self._memory.slot(place, shared) for place in self._places()]
                inputs = [slot[: stop - start] for slot in slots]
                inputs[self._me] = give[start:stop]
                self._make(take[start:stop], inputs, start)

        self._pass(Shape(gives=[len(give)] * self._count, room=room), put, use)

    def _reduce_by_windows(self, give: memoryview, take: memoryview) -> None:
        """Each rank reduces a segment of each window of the input, and gives it to all others."""
        room, itemsize = self._room_each(), self._work.itemsize
        most = room // (SEGMENT_MULTIPLE * itemsize) * SEGMENT_MULTIPLE * itemsize
        window = self._count * most

        def segments(number: int) -> list[tuple[int, int]]:
            start, stop = span(number // 2, window, len(give))
            found = cut((stop - start) // itemsize, self._count)
            return [(start + low * itemsize, start + high * itemsize) for low, high in found]

        def put(number: int, slot: memoryview) -> None:
            for place, (start, stop) in enumerate(segments(number)):
                if number % 2 == 0:
                    to = None if place == self._me else self._within(slot, place, room)
                    self._put(to if to is None else to[: stop - start], give[start:stop], start)
                elif place == self._me:
                    self._c.copy(slot[: stop - start], take[start:stop])

        def use(number: int, shared: int) -> None:
            for place, (start, stop) in enumerate(segments(number)):
                if number % 2 == 0 and place == self._me:
                    inputs = [
                        self._piece(each, shared, room, stop - start) for each in self._places()
                    ]
                    inputs[place] = give[start:stop]
                    self._make(take[start:stop], inputs, start)
                elif number % 2 and place != self._me:
                    slot = self._memory.slot(place, shared)
                    self._c.copy(take[start:stop], slot[: stop - start])

        parts, gives = 2 * max(1, -(-len(give) // window)), [len(give)] * self._count
        self._pass(Shape(gives=gives, room=room, parts=parts, ahead=False), put, use)
