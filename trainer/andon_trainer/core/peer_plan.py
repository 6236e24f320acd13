"""The words of a plan: spans of memory, transfers between ranks, and what is made of them.

`collectives` makes plans. docs/protocol-sessions.md, section 29, is normative.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "Buffer",
    "Make",
    "Places",
    "Plan",
    "Sizes",
    "Source",
    "Span",
    "Stage",
    "Transfer",
    "places_of",
]


class Buffer(enum.Enum):
    """In which memory a span lies."""

    GIVES = "gives"
    """`Part.gives`"""
    TAKES = "takes"
    """`Part.takes`"""
    SCRATCH = "scratch"
    """Memory of the call's own, `Plan.scratch_bytes` long."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one buffer."""

    buffer: Buffer
    part: int
    """The index in `Work.parts`; 0 for scratch."""
    index: int
    """The index in `Part.gives` or `Part.takes`; 0 for scratch."""
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self.stop - self.start

    def within(self, start: int, stop: int) -> Span:
        """The bytes `start` to `stop` of it."""
        return Span(self.buffer, self.part, self.index, self.start + start, self.start + stop)

    def overlap(self, other: Span) -> tuple[int, int] | None:
        """Which bytes of it are bytes of `other`, too, counted from its start; None: none are."""
        if (self.buffer, self.part, self.index) != (other.buffer, other.part, other.index):
            return None
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return (start - self.start, stop - self.start) if start < stop else None


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one rank gives to another in a stage: its spans one after the other, as one row."""

    peer: int
    """The other rank's number in the group."""
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return sum(span.size for span in self.spans)


@dataclass(frozen=True, slots=True)
class Make:
    """Makes one span of others that are as long, byte by byte from the start.

    Inputs of one call that has several tensors are never mixed: each Make is of one part.
    """

    out: Span
    inputs: tuple[Span, ...]
    """In the order in which they are reduced. `out` may be one of them."""
    reduces: bool
    """Whether it is a reduction, perhaps of one input; else `out` is a copy of the only input."""
    last: bool = True
    """Whether no further reduction follows: a mean is divided now."""
    after_gives: bool = False
    """Whether all gives of the stage must have left before: `out` may be where they lie."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank does in a stage. No two of its transfers have the same peer."""

    gives: tuple[Transfer, ...] = ()
    """By peer, those after the rank first. Empty transfers are left out."""
    gets: tuple[Transfer, ...] = ()
    """By peer. Empty transfers are left out."""
    makes: tuple[Make, ...] = ()
    """In an order in which each has its inputs from transfers, earlier stages and earlier makes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Which producer fills a part of a span: a transfer that is got, or a make."""

    stage: int
    transfer: int | None
    """The index in `Stage.gets`; None: it is a make."""
    make: int | None
    """The index in `Stage.makes`; None: it is a transfer."""
    needed: int
    """How many bytes of the producer must be there, from its first one on, for all of the part."""
    start: int
    """The first byte of the span that it fills."""
    stop: int


@dataclass(frozen=True)
class Plan:
    """What one rank does in a call."""

    stages: tuple[Stage, ...]
    scratch_bytes: int
    peers: tuple[int, ...]
    """The ranks of the group with which it exchanges something, in order."""

    def gives_bytes(self, peer: int) -> int:
        """How many bytes it gives to a rank, in all stages."""
        return sum(each.size for stage in self.stages for each in stage.gives if each.peer == peer)

    def gets_bytes(self, peer: int) -> int:
        """How many bytes it gets from a rank, in all stages."""
        return sum(each.size for stage in self.stages for each in stage.gets if each.peer == peer)

    @cached_property
    def give_sources(self) -> tuple[tuple[tuple[Source, ...], ...], ...]:
        """By stage and give: what fills it, in order; what is not in it is input."""
        return tuple(
            tuple(self._row_sources(number, each.spans) for each in stage.gives)
            for number, stage in enumerate(self.stages)
        )

    @cached_property
    def make_sources(self) -> tuple[tuple[tuple[tuple[Source, ...], ...], ...], ...]:
        """By stage, make and input: what fills it, in order; what is not in it is input."""
        return tuple(
            tuple(
                tuple(self._sources(number, index, each) for each in make.inputs)
                for index, make in enumerate(stage.makes)
            )
            for number, stage in enumerate(self.stages)
        )

    def _row_sources(self, stage: int, spans: Sequence[Span]) -> tuple[Source, ...]:
        found: list[Source] = []
        at = 0
        for span in spans:
            for each in self._sources(stage, None, span):
                moved = (each.start + at, each.stop + at)
                found.append(Source(each.stage, each.transfer, each.make, each.needed, *moved))
            at += span.size
        return tuple(found)

    def _sources(self, stage: int, make: int | None, span: Span) -> tuple[Source, ...]:
        """What fills `span` before a give of `stage`, or before its `make`; the latest counts."""
        missing, found = [(0, span.size)], list[Source]()
        for producer, filled in self._produced_before(stage, make):
            overlap = span.overlap(filled)
            if overlap is None:
                continue
            left: list[tuple[int, int]] = []
            for start, stop in missing:
                low, high = max(start, overlap[0]), min(stop, overlap[1])
                if low >= high:
                    left.append((start, stop))
                    continue
                left += [each for each in ((start, low), (high, stop)) if each[0] < each[1]]
                needed = producer[3] + (span.start + high - filled.start)
                found.append(Source(*producer[:3], needed, low, high))
            missing = left
        return tuple(sorted(found, key=lambda each: each.start))

    def _produced_before(
        self, stage: int, make: int | None
    ) -> Iterator[tuple[tuple[int, int | None, int | None, int], Span]]:
        """Each producer and what it fills, the latest first; it ends with where that begins."""
        for number in range(stage, -1, -1):
            here = self.stages[number]
            if number < stage or make is not None:
                makes = here.makes[: make if number == stage else None]
                for index in range(len(makes) - 1, -1, -1):
                    yield (number, None, index, 0), makes[index].out
                for index, transfer in enumerate(here.gets):
                    at = 0
                    for span in transfer.spans:
                        yield (number, index, None, at), span
                        at += span.size


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths in bytes of what a `Part` gives and takes."""

    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Places:
    """Where the ranks of a group are: its hosts, in the order of their lowest ranks."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each, in order. A rank without shared memory is a host of its own."""

    @cached_property
    def size(self) -> int:
        """How many ranks the group has."""
        return sum(len(host) for host in self.hosts)

    @cached_property
    def even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks of the rank's host, in order, itself too."""
        return next(host for host in self.hosts if rank in host)

    @cached_property
    def planned(self) -> Places:
        """The hosts that plans go by: if they are not even, each rank is one of its own."""
        return self if self.even else Places(tuple((rank,) for rank in range(self.size)))

    def alike(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place on their hosts, in the order of hosts, itself too."""
        place = self.neighbours(rank).index(rank)
        return tuple(host[place] for host in self.hosts)


def places_of(folders: Sequence[bytes]) -> Places:
    """The places of a group's ranks by their shared folders; empty: it shares no memory."""
    hosts: dict[object, list[int]] = {}
    for rank, folder in enumerate(folders):
        hosts.setdefault(folder or rank, []).append(rank)
    return Places(tuple(tuple(host) for host in hosts.values()))
