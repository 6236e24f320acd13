"""Collectives through the memory that neighbours share.

Theory of operation. A call is cut into parts, as many on every rank, which lie in two slots of each
rank. A rank gives the next part before it waits for the others' present one, so who is a little
ahead rarely waits. A part stays in the caches from the copy into the slot until the last rank has
read it: the memory of a tensor is read once and written once, however large it is.

In one *pass* all ranks give parts of the same shape: *whole*, where each reads all that another
gives, or *cut*, where each place of the slot is for one reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from andon.protocol.encoding import fused
from andon.protocol.peer_calls import SEGMENT_MULTIPLE, CallKind, cut
from andon_trainer.core.announcement import Announcement
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.peers.memory import CallDiffers, NeighbourMemory, Still

__all__ = ["SMALL_BYTES", "NotFinite", "Row", "run", "transfer"]

SMALL_BYTES = 64 * 2**10
"""Up to this size each rank reduces all of an input itself."""
_LINE = 64

Row = Sequence[memoryview]
"""Bytes one after the other, in several places of memory."""
_Put = Callable[[int, memoryview], None]
"""Writes the part of this number of the call into a slot."""
_Use = Callable[[int, int], None]
"""Reads what neighbours gave: the part's number in the call, and in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Of a pass."""

    gives: Sequence[int]
    """How many bytes this rank gives to each."""
    room: int
    """How many of them are in one part."""
    takes: Sequence[int] | None = None
    """How many bytes each must give to this rank; None: whatever it is."""
    parts: int | None = None
    """How many parts there are; None: as many as the rank needs that gives most."""
    ahead: bool = True
    """Whether a part may be written before the one before it was used."""


class NotFinite(Exception):
    """A value is not finite, and the call's gate is closed to it."""

    def __init__(self, part: int, element: int, *, reduced: bool) -> None:
        """Of part `part` of the call: of its result if `reduced`, else of its input."""
        super().__init__(f"element {element} of part {part} is not finite")
        self.part = part
        self.element = element
        self.reduced = reduced


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


def transfer(
    memory: NeighbourMemory,
    work: Work,
    sequence: int,
    stage: int,
    rows: Sequence[tuple[Row, Row]],
    still: Still,
) -> None:
    """Makes one stage of a call that has ranks elsewhere, too: what neighbours give each other.

    All neighbours make it, if one of them gives something to another.

    Args:
        memory: the group's, opened.
        work: the call.
        sequence: its number in the group.
        stage: the stage's number in the call.
        rows: by place, what that neighbour gets, and where what it gives is put.
        still: called while others are waited for.

    Raises:
        As `run`, but nothing is looked at: not NotFinite.
    """
    made = _Run(memory, replace(work, gate=None), sequence, still)
    made.number = stage
    made.exchange([gives for gives, _ in rows], [takes for _, takes in rows])


class _Run:
    """One call, or one stage of it."""

    def __init__(self, memory: NeighbourMemory, work: Work, sequence: int, still: Still) -> None:
        assert fused is not None
        self._c = fused
        self._memory = memory
        self._work = work
        self._sequence = sequence
        self._still = still
        self._count = len(memory.ranks)
        self._me = memory.me
        self._gated = work.gate is not None
        self._floats = work.call.dtype == "float32"
        self._sums = self._floats and work.call.reduction in ("sum", "avg")
        self._divisor = float(self._count) if work.call.reduction == "avg" else 1.0
        self.number = 0
        """Of the part or stage that is exchanged."""

    def run(self) -> None:
        """Makes the call."""
        kind = self._work.call.kind
        if kind is CallKind.BARRIER:
            shape = _Shape(gives=[0] * self._count, room=1)
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
            start, stop = _span(number, room, len(take))
            inputs = [self._piece(place, shared, room, stop - start) for place in self._places()]
            inputs[self._me] = part.gives[self._me][start:stop]
            self._make(take[start:stop], inputs, start)

        self._check(part.gives[self._me], sum(map(len, part.gives[: self._me])))
        gives, takes = [len(each) for each in part.gives], [len(take)] * self._count
        self._pass(_Shape(gives=gives, room=room, takes=takes), put, use)

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
            start, stop = _span(number, room, len(give))
            self._put(slot[: stop - start], give[start:stop], start)

        def use(number: int, shared: int) -> None:
            if takes is None:
                return
            for place in self._others():
                start, stop = _span(number, room, len(takes[place]))
                slot = self._memory.slot(place, shared)
                self._c.copy(takes[place][start:stop], slot[: stop - start])

        self._pass(_Shape(gives=[len(give)] * self._count, room=room, takes=expected), put, use)
        if takes is not None and len(takes[self._me]):
            self._c.copy(takes[self._me], give)

    def exchange(self, gives: Sequence[Row], takes: Sequence[Row]) -> None:
        """Each rank gives something else to each other one."""
        room = self._room_each()

        def put(number: int, slot: memoryview) -> None:
            self._put_each(gives, number, slot, room)

        def use(number: int, shared: int) -> None:
            for place in self._others():
                start, stop = _span(number, room, _size(takes[place]))
                piece = self._piece(place, shared, room, stop - start)
                for at, view in _views(takes[place], start, stop):
                    self._c.copy(view, piece[at : at + len(view)])

        given, expected = [_size(each) for each in gives], [_size(each) for each in takes]
        self._pass(_Shape(gives=given, room=room, takes=expected), put, use)

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
            start, stop = _span(number, room, len(give))
            self._put(slot[: stop - start], give[start:stop], start)

        def use(number: int, shared: int) -> None:
            start, stop = _span(number, room, len(give))
            if take is not None:
                slots = [self._memory.slot(place, shared) for place in self._places()]
                inputs = [slot[: stop - start] for slot in slots]
                inputs[self._me] = give[start:stop]
                self._make(take[start:stop], inputs, start)

        self._pass(_Shape(gives=[len(give)] * self._count, room=room), put, use)

    def _reduce_by_windows(self, give: memoryview, take: memoryview) -> None:
        """Each rank reduces a segment of each window of the input, and gives it to all others."""
        room, itemsize = self._room_each(), self._work.itemsize
        most = room // (SEGMENT_MULTIPLE * itemsize) * SEGMENT_MULTIPLE * itemsize
        window = self._count * most

        def segments(number: int) -> list[tuple[int, int]]:
            start, stop = _span(number // 2, window, len(give))
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
        self._pass(_Shape(gives=gives, room=room, parts=parts, ahead=False), put, use)

    def _pass(self, shape: _Shape, put: _Put, use: _Use) -> None:
        """Writes this rank's parts, and uses those of all."""
        memory, mine = self._memory, self._announcement(shape.gives)
        at, _ = memory.announce(self._still, mine)
        first, done, parts = memory.part, 0, 1
        put(0, memory.room(first))
        memory.give(first)
        while done < parts:
            memory.given(first + done)
            if done == 0:
                theirs = memory.announcements(at, mine)
                self._require(shape.takes, mine, theirs)
                most = max(max(each.gives) for each in theirs)
                parts = shape.parts or max(1, -(-most // shape.room))
            if shape.ahead:
                self._give_next(put, first, done + 1, parts)
            use(done, first + done)
            memory.take(first + done)
            done += 1
            if not shape.ahead:
                self._give_next(put, first, done, parts)
        memory.part = (first + parts) % 2**32

    def _give_next(self, put: _Put, first: int, number: int, parts: int) -> None:
        if number < parts:
            put(number, self._memory.room(first + number))
            self._memory.give(first + number)

    def _require(
        self, takes: Sequence[int] | None, mine: Announcement, theirs: Sequence[Announcement]
    ) -> None:
        if takes is None:
            return
        for place in self._others():
            if theirs[place].gives[self._me] != takes[place]:
                raise CallDiffers(self._memory.ranks[place], mine, theirs[place])

    def _announcement(self, gives: Sequence[int]) -> Announcement:
        return Announcement(self._sequence, self.number, self._work.call, tuple(gives))

    # Places in slots.

    def _places(self) -> range:
        return range(self._count)

    def _others(self) -> Iterator[int]:
        # Not all begin with the same one: its memory would be read by all at once.
        return ((self._me + step) % self._count for step in range(1, self._count))

    def _room_each(self) -> int:
        return self._memory.slot_bytes // max(1, self._count - 1) // _LINE * _LINE

    def _within(self, slot: memoryview, reader: int, room: int) -> memoryview:
        """The place in an own slot that is for one reader."""
        index = reader - (reader > self._me)
        return slot[index * room : (index + 1) * room]

    def _piece(self, place: int, shared: int, room: int, size: int) -> memoryview:
        """What a neighbour gives to this rank in a part."""
        index = self._me - (self._me > place)
        return self._memory.slot(place, shared)[index * room : index * room + size]

    # Bytes.

    def _put_each(self, gives: Sequence[Row], number: int, slot: memoryview, room: int) -> None:
        first = 0
        for place, row in enumerate(gives):
            size = _size(row)
            if place != self._me:
                start, stop = _span(number, room, size)
                to = self._within(slot, place, room)
                for at, view in _views(row, start, stop):
                    self._put(to[at : at + len(view)], view, first + start + at)
            first += size

    def _put(self, to: memoryview | None, values: memoryview, at: int) -> None:
        """Copies a piece of the input, from byte `at` on, once it was looked at."""
        if self._gated and self._floats:
            bad = self._c.checked_copy(to, values)
            if bad >= 0:
                self._found(0, at // self._work.itemsize + bad)
            return
        self._check(values, at)
        if to is not None:
            self._c.copy(to, values)

    def _check(self, values: memoryview, at: int) -> None:
        """Looks for what is not finite in a piece of the input."""
        gate = self._work.gate if self._gated else None
        if gate is None:
            return
        bad = self._c.checked_copy(None, values) if self._floats else gate.first_bad(values)
        if bad is not None and bad >= 0:
            self._found(0, at // self._work.itemsize + bad)

    def _make(self, out: memoryview, inputs: Sequence[memoryview], at: int) -> None:
        """Reduces pieces, and looks at the result, of which it is the byte `at` on."""
        gate = self._work.gate if self._gated else None
        bad: int | None
        if self._sums:
            bad = self._c.sum(out, tuple(inputs), self._divisor)
        else:
            assert self._work.reduce is not None
            self._work.reduce(out, inputs, last=True)
            bad = None if gate is None else gate.first_bad(out)
        if gate is not None and bad is not None and bad >= 0:
            self._found(1, at // self._work.itemsize + bad)

    def _found(self, reduced: int, element: int) -> None:
        """Something is not finite: the call ends unless that is expected."""
        gate = self._work.gate
        assert gate is not None
        if not gate.expected():
            raise NotFinite(self.number, element, reduced=bool(reduced))
        self._gated = False


def _span(number: int, room: int, size: int) -> tuple[int, int]:
    """The bytes of a part, of so many."""
    return min(size, number * room), min(size, (number + 1) * room)


def _size(row: Row) -> int:
    return sum(len(each) for each in row)


def _views(row: Row, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes `start` to `stop` of a row, and where each piece is in them."""
    at = 0
    for view in row:
        low, high = max(start, at), min(stop, at + len(view))
        if low < high:
            yield low - start, view[low - at : high - at]
        at += len(view)
