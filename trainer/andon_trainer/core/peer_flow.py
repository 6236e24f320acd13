"""The flow of one call at one rank: what is there, and what may therefore leave or be made next.

Theory of operation. A plan says what each span is made of. A flow counts, for each transfer and
each make, how many bytes of it are done, always from the first one on. So what may leave of a span
is a prefix, too, and nothing ever waits for a whole stage. Counting is all that a flow does: it
knows of no other call, no lane and no Begin, but is told to whom it may give.

Each make is given out in one part at a time, so that two threads never reduce into the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from andon.protocol.peer_calls import EAGER_BYTES
from andon_trainer.core.peer_plan import Plan, Source, Span, Transfer

__all__ = ["Flow", "Give", "MakeSome", "PeerViolation"]

PIECE_BYTES = 2**20
"""The longest piece that is sent. Shorter ones cost more calls, longer ones leave the caches."""
LEAST_BYTES = 2**17
"""A shorter piece waits for more, unless it is the last one."""
START_BYTES = 4 * EAGER_BYTES
"""What a rank gives to all others together, of transfers that are not eager as a whole, before
their Begins are here. So links fill and congestion windows grow while Begins are on their way. What
a late rank must keep does not grow with the number of ranks."""
LEAST_START_BYTES = 2**14
"""A shorter start is not worth a piece of its own."""
WINDOW_BYTES = 4 * PIECE_BYTES
"""What may wait for its lane of one transfer, so that others find room between its pieces."""


class PeerViolation(Exception):
    """Another rank sent what breaks the protocol: what it was, for people."""


@dataclass(frozen=True, slots=True)
class Give:
    """Bytes of a transfer that may leave now."""

    stage: int
    give: int
    """The index in `Stage.gives`."""
    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MakeSome:
    """Bytes of a make whose inputs are there."""

    stage: int
    make: int
    """The index in `Stage.makes`."""
    start: int
    stop: int


@dataclass(slots=True)
class _Outgoing:
    """A transfer that is given."""

    stage: int
    give: int
    transfer: Transfer
    size: int
    sources: tuple[Source, ...]
    queued: int = 0
    """Bytes that were given out to be sent."""
    left: int = 0
    """Bytes that nobody reads here any more."""


@dataclass(slots=True)
class _Making:
    """A make."""

    stage: int
    make: int
    size: int
    sources: tuple[tuple[Source, ...], ...]
    after_gives: bool
    done: int = 0
    busy: bool = False
    """Whether a part of it is given out."""


@dataclass(slots=True)
class Flow:
    """One call's bytes at one rank."""

    plan: Plan
    itemsize: int
    elsewhere: frozenset[int]
    """The peers that are reached over lanes; the others share memory."""
    may_give: set[int] = field(default_factory=set)
    """The peers whose Begin is here."""
    _gives: list[_Outgoing] = field(init=False)
    """Those over lanes that have not all left."""
    _makes: list[_Making] = field(init=False)
    """Those that are not whole."""
    _got: dict[tuple[int, int], int] = field(default_factory=dict)
    """By stage and index in `Stage.gets`: bytes that are here."""
    _made: dict[tuple[int, int], int] = field(default_factory=dict)
    """By stage and index in `Stage.makes`: bytes that are made."""
    _missing: int = field(init=False)
    """Bytes of all transfers and makes that are not done."""
    _gets: dict[tuple[int, int], tuple[int, int]] = field(init=False)
    """By stage and peer: the index in `Stage.gets`, and the size."""
    _feeds: dict[tuple[int, int], list[tuple[int, int, int, _Making]]] = field(init=False)
    """By stage and peer: which bytes of what it gives are which input of a reduction."""
    _unread: dict[int, int] = field(init=False)
    """By stage: bytes of its gives that have not left."""
    _start_bytes: int = field(init=False)
    """What may follow this rank's Begin of a transfer that is not eager as a whole."""

    def __post_init__(self) -> None:
        """Counts what is to be done."""
        plan = self.plan
        self._gives = [
            _Outgoing(s, i, each, each.size, plan.give_sources[s][i])
            for s, stage in enumerate(plan.stages)
            for i, each in enumerate(stage.gives)
        ]
        self._makes = [
            _Making(s, i, each.out.size, plan.make_sources[s][i], each.after_gives)
            for s, stage in enumerate(plan.stages)
            for i, each in enumerate(stage.makes)
        ]
        self._gets = {
            (s, each.peer): (i, each.size)
            for s, stage in enumerate(plan.stages)
            for i, each in enumerate(stage.gets)
        }
        self._feeds = {}
        for making in self._makes:
            self._feed(making)
        self._start_bytes = _start_bytes(
            sum(each.stage == 0 and each.transfer.peer in self.elsewhere for each in self._gives)
        )
        self._unread = {s: sum(t.size for t in stage.gives) for s, stage in enumerate(plan.stages)}
        self._missing = (
            sum(each.size for each in self._gives)
            + sum(each.size for each in self._makes)
            + sum(size for _, size in self._gets.values())
        )

    def _feed(self, making: _Making) -> None:
        stage = self.plan.stages[making.stage]
        make = stage.makes[making.make]
        if not make.reduces or len(make.inputs) < 2:
            return
        places = {span: place for place, span in enumerate(make.inputs)}
        for transfer in stage.gets:
            at = 0
            for span in transfer.spans:
                if span in places:
                    found = (at, at + span.size, places[span], making)
                    self._feeds.setdefault((making.stage, transfer.peer), []).append(found)
                at += span.size

    @property
    def whole(self) -> bool:
        """Whether every byte has come, was made and has left."""
        return not self._missing

    def missing_from(self) -> list[int]:
        """The peers of which something is missing, in order."""
        return sorted(
            {
                peer
                for (stage, peer), (index, size) in self._gets.items()
                if self._got.get((stage, index), 0) < size
            }
        )

    def unsent_to(self) -> list[int]:
        """The peers to which something has not left, in order."""
        return sorted({each.transfer.peer for each in self._gives})

    # ------------------------------------------------------------------ what came

    def landing(self, peer: int, stage: int, offset: int, length: int) -> list[Span]:
        """Where the next bytes of a transfer go.

        Raises:
            PeerViolation: they are not the next ones of anything that the peer gives.
        """
        found = self._gets.get((stage, peer))
        if found is None:
            raise PeerViolation(f"a piece of stage {stage}, in which it gives nothing")
        index, size = found
        expected = self._got.get((stage, index), 0)
        if offset != expected or offset + length > size:
            raise PeerViolation(
                f"bytes {offset} to {offset + length} of stage {stage}, where {expected} of {size} "
                "came before"
            )
        return list(row_of(self.plan.stages[stage].gets[index].spans, offset, offset + length))

    def summing(
        self, peer: int, stage: int, offset: int, length: int
    ) -> tuple[MakeSome, int] | None:
        """The make whose last missing input these bytes are, and which of its inputs it is.

        None: they must lie somewhere first. Else the make is given out: whoever receives the bytes
        reduces them on the way. `landing` must have said that they are the next ones.
        """
        for at, stop, input_, making in self._feeds.get((stage, peer), ()):
            if not at <= offset or offset + length > stop:
                continue
            start, end = offset - at, offset - at + length
            if (
                making.busy
                or making.done != start
                or (start % self.itemsize or end % self.itemsize)
                or (making.after_gives and self._unread[stage])
            ):
                return None
            for other, sources in enumerate(making.sources):
                if other != input_ and self._ready(sources, making.size) < end:
                    return None
            making.busy = True
            return MakeSome(stage, making.make, start, end), input_
        return None

    def landed(self, peer: int, stage: int, upto: int) -> None:
        """The bytes of a transfer up to `upto` are here."""
        index, _ = self._gets[stage, peer]
        self._missing -= upto - self._got.get((stage, index), 0)
        self._got[stage, index] = upto

    def made(self, stage: int, make: int, upto: int) -> None:
        """The bytes of a make up to `upto` are made."""
        for at, each in enumerate(self._makes):
            if (each.stage, each.make) == (stage, make):
                self._missing -= upto - each.done
                each.done, each.busy = upto, False
                self._made[stage, make] = upto
                if upto == each.size:
                    del self._makes[at]
                return
        raise AssertionError("a make that is whole is not made again")

    def left(self, stage: int, give: int, upto: int) -> None:
        """Nobody reads the bytes of a give up to `upto` here any more."""
        for at, each in enumerate(self._gives):
            if (each.stage, each.give) == (stage, give):
                self._missing -= upto - each.left
                self._unread[stage] -= upto - each.left
                each.left, each.queued = upto, max(upto, each.queued)
                if upto == each.size:
                    del self._gives[at]
                return
        raise AssertionError("a give that has left does not leave again")

    # ------------------------------------------------------------------ what may be done

    def eager_bytes(self, stage: int, size: int) -> int:
        """How many bytes of a transfer may follow this rank's Begin at once, from the first one."""
        if stage:
            return 0
        return size if size <= EAGER_BYTES else self._start_bytes

    def advance(self) -> tuple[list[Give], list[MakeSome]]:
        """What may leave over lanes, and what can be made; each is given out once."""
        gives: list[Give] = []
        for each in self._gives:
            peer = each.transfer.peer
            if peer not in self.elsewhere:
                continue
            begun = peer in self.may_give
            most = each.size if begun else self.eager_bytes(each.stage, each.size)
            gives += self._pieces(each, most)
        # Every lane gets its first piece before any gets its second one.
        gives.sort(key=lambda give: give.start > 0)
        makes: list[MakeSome] = []
        for making in self._makes:
            if not making.busy and not (making.after_gives and self._unread[making.stage]):
                some = self._some_of(making)
                if some is not None:
                    makes.append(some)
        return gives, makes

    def give_ready(self, stage: int, give: int) -> int:
        """How many bytes of a give are there."""
        transfer = self.plan.stages[stage].gives[give]
        return self._ready(self.plan.give_sources[stage][give], transfer.size)

    def _pieces(self, each: _Outgoing, most: int) -> Iterator[Give]:
        ready = self._ready(each.sources, each.size)
        upto = min(ready, most)
        while each.queued < upto and each.queued - each.left < WINDOW_BYTES:
            if ready - each.queued < LEAST_BYTES and ready < each.size:
                return
            longest = PIECE_BYTES
            if not each.queued and self._start_bytes:
                # As long for those that have begun: they would be behind all others, who get
                # theirs from the caller's thread at once.
                longest = self.eager_bytes(each.stage, each.size) or PIECE_BYTES
            start, each.queued = each.queued, min(upto, each.queued + longest)
            yield Give(each.stage, each.give, each.transfer.peer, start, each.queued)

    def _some_of(self, making: _Making) -> MakeSome | None:
        ready = min(self._ready(each, making.size) for each in making.sources)
        if ready < making.size:
            ready -= ready % self.itemsize
            if ready - making.done < LEAST_BYTES:
                return None
        start, stop = making.done, min(ready, making.done + PIECE_BYTES)
        if start == stop:
            return None
        making.busy = True
        return MakeSome(making.stage, making.make, start, stop)

    def _ready(self, sources: Sequence[Source], size: int) -> int:
        """How many bytes are there of what has these sources; what none fills is input."""
        for each in sources:
            done = (
                self._got.get((each.stage, each.transfer), 0)
                if each.transfer is not None
                else self._made.get((each.stage, each.make or 0), 0)
            )
            if done < each.needed:
                return max(each.start, each.stop - (each.needed - done))
        return size


def _start_bytes(transfers: int) -> int:
    """How many bytes of each of so many transfers may leave before any Begin is here."""
    share = EAGER_BYTES
    while share * transfers > START_BYTES:
        share //= 2
    return share if share >= LEAST_START_BYTES else 0


def row_of(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """The spans of the bytes `start` to `stop` of a transfer."""
    at = 0
    for span in spans:
        low, high = max(start, at), min(stop, at + span.size)
        if low < high:
            yield span.within(low - at, high - at)
        at += span.size
        if at >= stop:
            return
