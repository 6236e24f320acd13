"""Passes through the memory that neighbours share: the parts of a tensor, given and used.

Theory of operation. A tensor is cut into parts, as many on every rank, which lie in two slots of
each rank. A rank gives the next part before it waits for the others' present one, so who is a
little ahead rarely waits. A part stays in the caches from the copy into the slot until the last
rank has read it: the memory of a tensor is read once and written once, however large it is.

In one *pass* all ranks give parts of the same shape: *whole*, where each reads all that another
gives, or *cut*, where each place of the slot is for one reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from andon.protocol.encoding import fused
from andon_trainer.core.announcement import Announcement
from andon_trainer.core.peer_work import Work
from andon_trainer.peers.memory import CallDiffers, NeighbourMemory, Still

__all__ = ["NotFinite", "Passes", "Row", "Shape", "size_of", "span", "views_of"]

_LINE = 64

Row = Sequence[memoryview]
"""Bytes one after the other, in several places of memory."""
_Put = Callable[[int, memoryview], None]
"""Writes the part of this number of the call into a slot."""
_Use = Callable[[int, int], None]
"""Reads what neighbours gave: the part's number in the call, and in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a pass."""

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


class Passes:
    """The passes of one call at one rank."""

    def __init__(self, memory: NeighbourMemory, work: Work, sequence: int, still: Still) -> None:
        """Nothing is exchanged before `_pass`; `sequence` is the call's number in its group."""
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

    def _pass(self, shape: Shape, put: _Put, use: _Use) -> None:
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
            size = size_of(row)
            if place != self._me:
                start, stop = span(number, room, size)
                to = self._within(slot, place, room)
                for at, view in views_of(row, start, stop):
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


def span(number: int, room: int, size: int) -> tuple[int, int]:
    """The bytes of a part, of so many."""
    return min(size, number * room), min(size, (number + 1) * room)


def size_of(row: Row) -> int:
    """The bytes of a row."""
    return sum(len(each) for each in row)


def views_of(row: Row, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
    """The bytes `start` to `stop` of a row, and where each piece is in them."""
    at = 0
    for view in row:
        low, high = max(start, at), min(stop, at + len(view))
        if low < high:
            yield low - start, view[low - at : high - at]
        at += len(view)
