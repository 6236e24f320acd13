"""The plan of a call: which bytes one rank gives to whom, which it gets, and what it reduces.

Theory of operation. A plan is a few *stages*. In a stage a rank gives spans of its memory to other
ranks, gets spans from them, and then makes new spans out of what it has: copies and reductions.
Every rank computes its own plan from the call, the sizes of its own tensors and the places of the
group's ranks; what rank a gives to rank b in a stage is as long as what b gets from a there.

Nothing here waits for a whole stage. A span may leave as soon as those that it is made of are
there, from its first byte on; `Plan.sources` says which ones these are.

Reductions are defined to the bit. A sum is that of the hosts' sums, in the order of hosts, each in
the order of ranks, left to right. So all plans of a kind give the same bits, on all ranks.
docs/protocol-sessions.md, section 29, is normative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from andon.protocol.peer_calls import EAGER_BYTES, Call, CallKind, cut
from andon_trainer.core.peer_plan import (
    Buffer,
    Make,
    Places,
    Plan,
    Sizes,
    Span,
    Stage,
    Transfer,
)

__all__ = ["plan_of"]

_SCRATCH_MULTIPLE = 64
"""Spans of scratch memory start at a multiple of so many bytes: a line of the caches."""
_DIRECT_BYTES = 4 * EAGER_BYTES
"""The most that a rank gives to all others together in a direct reduction."""


@lru_cache(maxsize=256)
def plan_of(
    call: Call,
    sizes: tuple[Sizes, ...],
    itemsize: int,
    places: Places,
    rank: int,
    peer: int | None = None,
) -> Plan:
    """The plan of one rank in a call.

    Args:
        call: the call.
        sizes: the lengths of this rank's parts.
        itemsize: bytes of an element.
        places: where the group's ranks are.
        rank: this rank's number in the group.
        peer: the other rank of a SEND. Who takes something is the receiver.

    Raises:
        ValueError: the parts are not those of such a call.
    """
    planner = _Planner(call, itemsize, places, rank)
    if call.kind is CallKind.BARRIER:
        return Plan((), 0, tuple(each for each in range(places.size) if each != rank))
    if len(sizes) != call.tensors:
        raise ValueError(f"{len(sizes)} tensors for {call}")
    for part, lengths in enumerate(sizes):
        planner.add(part, lengths, peer)
    return planner.plan()


@dataclass(slots=True)
class _Drawn:
    """A stage that is being planned."""

    gives: dict[int, list[Span]] = field(default_factory=dict)
    gets: dict[int, list[Span]] = field(default_factory=dict)
    makes: list[Make] = field(default_factory=list)

    def give(self, peer: int, span: Span) -> None:
        if span.size:
            self.gives.setdefault(peer, []).append(span)

    def get(self, peer: int, span: Span) -> None:
        if span.size:
            self.gets.setdefault(peer, []).append(span)

    def stage(self, rank: int) -> Stage:
        gives, gets = (
            {peer: Transfer(peer, tuple(spans)) for peer, spans in sorted(each.items())}
            for each in (self.gives, self.gets)
        )
        # To those after this rank first: if all began with the same one, its link would be shared
        # while others' are idle.
        order = sorted(gives, key=lambda peer: (peer < rank, peer))
        return Stage(tuple(gives[peer] for peer in order), tuple(gets.values()), tuple(self.makes))


@dataclass(slots=True)
class _Planner:
    """Plans the parts of a call one after the other; they share stages."""

    call: Call
    itemsize: int
    places: Places
    rank: int
    drawn: list[_Drawn] = field(default_factory=list)
    scratch_bytes: int = 0

    def plan(self) -> Plan:
        stages = tuple(each.stage(self.rank) for each in self.drawn)
        peers = {each.peer for stage in stages for each in (*stage.gives, *stage.gets)}
        return Plan(stages, self.scratch_bytes, tuple(sorted(peers)))

    def add(self, part: int, sizes: Sizes, peer: int | None) -> None:
        """Plans one part.

        Raises:
            ValueError: it is not one of such a call.
        """
        _require(self.call, self.itemsize, self.places.size, self.rank, sizes)
        gives = [Span(Buffer.GIVES, part, i, 0, size) for i, size in enumerate(sizes.gives)]
        takes = [Span(Buffer.TAKES, part, i, 0, size) for i, size in enumerate(sizes.takes)]
        match self.call.kind:
            case CallKind.ALL_REDUCE | CallKind.REDUCE:
                self._reduce(gives[0], takes[0] if takes else None)
            case CallKind.REDUCE_SCATTER:
                self._reduce_scatter(gives, takes[0])
            case CallKind.ALL_GATHER:
                self._all_gather(gives[0], takes)
            case CallKind.BROADCAST:
                self._broadcast((gives or takes)[0])
            case CallKind.SEND:
                self._send(gives, takes, peer)
            case _:
                self._exchange(gives, takes)

    # ------------------------------------------------------------------ kinds

    def _reduce(self, given: Span, result: Span | None) -> None:
        """ALL_REDUCE and REDUCE; `result` is None where nothing is taken."""
        n = self.places.size
        if n == 1 or (given.size <= EAGER_BYTES and given.size * (n - 1) <= _DIRECT_BYTES):
            self._reduce_directly(given, result)
            return
        planned = self.places.planned
        rings = [
            ring
            for ring in (planned.neighbours(self.rank), planned.alike(self.rank))
            if len(ring) > 1
        ]
        # What this rank answers for becomes a shorter segment in each scatter.
        source, out, segments = given, result, list[list[Span]]()
        for number, ring in enumerate(rings):
            cuts = self._scatter(number, ring, source)
            start, stop = cuts[ring.index(self.rank)]
            if out is None:
                out = self._scratch(stop - start)
            else:
                segments.append([out.within(*each) for each in cuts])
                out = out.within(start, stop)
            for piece in self._by_host(ring, source.within(start, stop), 1):
                inputs = self._gathered(self._stage(number), ring, piece)
                at = piece.start - source.start - start
                made = out.within(at, at + piece.size)
                self._make(self._stage(number), made, inputs, last=number == len(rings) - 1)
            source = out
        if self.call.kind is CallKind.REDUCE:
            self._give_to_root(len(rings), source, result)
            return
        for number, ring in enumerate(reversed(rings), start=len(rings)):
            self._gather(self._stage(number), ring, segments.pop())

    def _gather(self, stage: _Drawn, ring: Sequence[int], segments: list[Span]) -> None:
        """Gives the rank's segment of a result to all of a ring, and gets theirs."""
        own = segments[ring.index(self.rank)]
        for member, segment in zip(ring, segments, strict=True):
            if member != self.rank:
                for piece in self._by_host(ring, own, 0):
                    stage.give(member, piece)
                for piece in self._by_host(ring, segment, 0):
                    stage.get(member, piece)

    def _by_host(self, ring: Sequence[int], segment: Span, first: int) -> list[Span]:
        """A segment that neighbours give each other, in the order in which it moves.

        What other hosts sum comes before what this one sums, and goes on to them while that moves
        (`first` is 1). The other way, what this one sums is there before what they bring (0).
        """
        alike = self.places.planned.alike(self.rank)
        if ring == alike:
            return [segment]
        cuts = cut(segment.size // self.itemsize, len(alike))
        first += alike.index(self.rank)
        return [
            segment.within(start * self.itemsize, stop * self.itemsize)
            for start, stop in (*cuts[first:], *cuts[:first])
        ]

    def _scatter(self, number: int, ring: Sequence[int], source: Span) -> list[tuple[int, int]]:
        """Gives each rank of a ring its segment; the bytes of all segments, counted in `source`."""
        cuts = [
            (start * self.itemsize, stop * self.itemsize)
            for start, stop in cut(source.size // self.itemsize, len(ring))
        ]
        for member, span in zip(ring, cuts, strict=True):
            if member != self.rank:
                for piece in self._by_host(ring, source.within(*span), 1):
                    self._stage(number).give(member, piece)
        return cuts

    def _give_to_root(self, number: int, reduced: Span, result: Span | None) -> None:
        """The last stage of REDUCE: each rank gives what it has reduced to the root."""
        assert self.call.root is not None, "REDUCE has a root"
        stage = self._stage(number)
        if result is None:
            stage.give(self.call.root, reduced)
            return
        for each in self._others:
            stage.get(each, result.within(*self._answered(each, result.size)))

    def _answered(self, rank: int, size: int) -> tuple[int, int]:
        """Which bytes of the result a rank has reduced after the scatters."""
        planned = self.places.planned
        start, stop = 0, size // self.itemsize
        for ring in (planned.neighbours(rank), planned.alike(rank)):
            low, high = cut(stop - start, len(ring))[ring.index(rank)]
            start, stop = start + low, start + high
        return start * self.itemsize, stop * self.itemsize

    def _reduce_directly(self, given: Span, result: Span | None) -> None:
        """A small reduction: who takes the result gets all inputs, and reduces all of them."""
        stage = self._stage(0)
        for each in self._others:
            if self.call.root in (None, each):
                stage.give(each, given)
        if result is None:
            return
        sums: list[Span] = []
        hosts = self.places.planned.hosts
        inputs = dict(
            zip(
                range(self.places.size),
                self._gathered(stage, range(self.places.size), given),
                strict=True,
            )
        )
        for host in hosts:
            if len(host) == 1 or len(hosts) == 1:
                sums += [inputs[rank] for rank in host]
                continue
            sums.append(self._scratch(given.size))
            self._make(stage, sums[-1], [inputs[rank] for rank in host], last=False)
        # Else a call in place would give its result where it should give its input. In stages a
        # rank never gives what it reduces itself.
        self._make(stage, result, sums, after_gives=True)

    def _reduce_scatter(self, gives: list[Span], result: Span) -> None:
        stage = self._stage(0)
        for each in self._others:
            stage.give(each, gives[each])
        inputs = self._gathered(stage, range(self.places.size), gives[self.rank])
        self._make(stage, result, inputs)

    def _all_gather(self, given: Span, takes: list[Span]) -> None:
        planned = self.places.planned
        alike, neighbours = planned.alike(self.rank), planned.neighbours(self.rank)
        stage = self._stage(0)
        self._copy(stage, takes[self.rank], given)
        for each in alike:
            if each != self.rank:
                stage.give(each, given)
                stage.get(each, takes[each])
        stage = self._stage(int(len(alike) > 1))
        for each in neighbours:
            if each != self.rank:
                for mine, its in zip(alike, planned.alike(each), strict=True):
                    # Its own input goes from where it lies: there is no copy to wait for.
                    stage.give(each, given if mine == self.rank else takes[mine])
                    stage.get(each, takes[its])

    def _broadcast(self, whole: Span) -> None:
        planned, root = self.places.planned, self.call.root
        assert root is not None, "BROADCAST has a root"
        alike = planned.alike(root)
        for number, givers in enumerate([[root], alike] if len(alike) > 1 else [alike]):
            stage = self._stage(number)
            for giver in givers:
                first = number == 0 and len(alike) > 1
                takers = alike if first else planned.neighbours(giver)
                for taker in takers:
                    if taker == giver:
                        continue
                    if self.rank == giver:
                        stage.give(taker, whole)
                    elif self.rank == taker:
                        stage.get(giver, whole)

    def _send(self, gives: list[Span], takes: list[Span], peer: int | None) -> None:
        if peer is None or peer == self.rank:
            raise ValueError(
                "a SEND is planned once the other rank is known, and it is another one"
            )
        for span in gives:
            self._stage(0).give(peer, span)
        for span in takes:
            self._stage(0).get(peer, span)

    def _exchange(self, gives: list[Span], takes: list[Span]) -> None:
        """GATHER, SCATTER and ALL_TO_ALL: each gives to each other one what that gets."""
        kind, root, stage = self.call.kind, self.call.root, self._stage(0)
        # The only span, or one for each rank.
        given = gives * self.places.size if kind is CallKind.GATHER else gives
        taken = takes * self.places.size if kind is CallKind.SCATTER else takes
        for each in self._others:
            if given and (kind is not CallKind.GATHER or each == root):
                stage.give(each, given[each])
            if taken and (kind is not CallKind.SCATTER or each == root):
                stage.get(each, taken[each])
        if given and taken:
            self._copy(stage, taken[self.rank], given[self.rank])

    # ------------------------------------------------------------------ what they are made of

    @property
    def _others(self) -> list[int]:
        return [each for each in range(self.places.size) if each != self.rank]

    def _stage(self, number: int) -> _Drawn:
        while len(self.drawn) <= number:
            self.drawn.append(_Drawn())
        return self.drawn[number]

    def _scratch(self, size: int) -> Span:
        start = self.scratch_bytes
        self.scratch_bytes += size + -size % _SCRATCH_MULTIPLE
        return Span(Buffer.SCRATCH, 0, 0, start, start + size)

    def _gathered(self, stage: _Drawn, ring: Sequence[int], own: Span) -> list[Span]:
        """The inputs of a reduction, in order: this rank's own, and scratch for those of others."""
        inputs: list[Span] = []
        for member in ring:
            if member == self.rank:
                inputs.append(own)
                continue
            inputs.append(self._scratch(own.size))
            stage.get(member, inputs[-1])
        return inputs

    def _make(
        self,
        stage: _Drawn,
        out: Span,
        inputs: list[Span],
        *,
        last: bool = True,
        after_gives: bool = False,
    ) -> None:
        if out.size:
            made = Make(out, tuple(inputs), reduces=True, last=last, after_gives=after_gives)
            stage.makes.append(made)

    def _copy(self, stage: _Drawn, out: Span, source: Span) -> None:
        if out.size:
            stage.makes.append(Make(out, (source,), reduces=False))


def _require(call: Call, itemsize: int, ranks: int, rank: int, sizes: Sizes) -> None:
    """Refuses parts that the call does not have.

    Raises:
        ValueError: naturally.
    """
    at_root, receives = rank == call.root, not sizes.gives
    # How many tensors a part gives and takes, and which of them are of the rank itself.
    expected, own = {
        CallKind.ALL_REDUCE: ((1, 1), (0, 0)),
        CallKind.REDUCE: ((1, int(at_root)), (0, 0)),
        CallKind.REDUCE_SCATTER: ((ranks, 1), (rank, 0)),
        CallKind.ALL_GATHER: ((1, ranks), (0, rank)),
        CallKind.GATHER: ((1, ranks * at_root), (0, rank)),
        CallKind.SCATTER: ((ranks * at_root, 1), (rank, 0)),
        CallKind.BROADCAST: ((int(at_root), int(not at_root)), (0, 0)),
        CallKind.ALL_TO_ALL: ((ranks, ranks), (rank, rank)),
        CallKind.SEND: ((int(not receives), int(receives)), (0, 0)),
    }[call.kind]
    if (len(sizes.gives), len(sizes.takes)) != expected:
        raise ValueError(
            f"{call}: rank {rank} gives {len(sizes.gives)} tensors and takes "
            f"{len(sizes.takes)}, and not {expected[0]} and {expected[1]}"
        )
    if any(size % itemsize for size in (*sizes.gives, *sizes.takes)):
        raise ValueError(f"{call}: not whole elements of {itemsize} bytes")
    if sizes.gives and sizes.takes and sizes.gives[own[0]] != sizes.takes[own[1]]:
        raise ValueError(
            f"{call}: rank {rank} gives itself {sizes.gives[own[0]]} bytes, and "
            f"takes {sizes.takes[own[1]]}"
        )
