"""Calls with what each rank brings to them and what it must have afterwards, computed directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from andon.protocol.peer_calls import Call, CallKind
from andon_trainer.core.collectives import Places
from andon_trainer.core.peer_work import Gate, Part, Work

__all__ = ["CASES", "PLACES", "Case", "collective", "reduce_floats", "sending"]

Floats = npt.NDArray[np.float32]

ITEM = 4
ROOTED = (CallKind.REDUCE, CallKind.GATHER, CallKind.SCATTER, CallKind.BROADCAST)
REDUCING = (CallKind.ALL_REDUCE, CallKind.REDUCE, CallKind.REDUCE_SCATTER)
COLLECTIVES = tuple(kind for kind in CallKind if kind is not CallKind.SEND)


def reduce_floats(out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> None:
    """The sum of float32, left to right."""
    del last
    acc = np.frombuffer(inputs[0], np.float32).copy()
    for each in inputs[1:]:
        acc += np.frombuffer(each, np.float32)
    np.frombuffer(out, np.float32)[:] = acc


@dataclass
class Case:
    """A call of one group."""

    places: Places
    works: list[Work]
    """By rank."""
    expected: list[list[list[Floats] | None]]
    """By rank and part: what `takes` must hold; None: nothing is taken."""
    arrays: list[list[tuple[list[Floats], list[Floats]]]] = field(default_factory=list)
    """By rank and part, what its work's views are of."""

    def check(self, rank: int) -> None:
        """Compares what a rank has taken, bit for bit."""
        for (_, takes), wanted in zip(self.arrays[rank], self.expected[rank], strict=True):
            if wanted is not None:
                for index, (found, right) in enumerate(zip(takes, wanted, strict=True)):
                    assert found.tobytes() == right.tobytes(), (
                        f"{self.works[rank].call}, rank {rank}, tensor {index}: {found} != {right}"
                    )


def host_sum(vectors: Sequence[Floats], places: Places) -> Floats:
    """The sum as section 29 defines it: that of the sums of hosts, each in the order of ranks."""
    hosts = places.hosts if places.even else tuple((rank,) for rank in range(places.size))
    sums = [flat_sum([vectors[rank] for rank in host]) for host in hosts]
    return flat_sum(sums)


def flat_sum(vectors: Sequence[Floats]) -> Floats:
    """The sum, left to right."""
    acc = vectors[0].copy()
    for each in vectors[1:]:
        acc += each
    return acc


def collective(
    kind: CallKind,
    places: Places,
    counts: Sequence[int],
    *,
    root: int = 0,
    in_place: bool = False,
    seed: int = 0,
    gates: Sequence[Gate | None] | None = None,
    uneven: bool = False,
) -> Case:
    """A collective call of one tensor for each count, with random numbers."""
    n, drawn = places.size, np.random.default_rng(seed)

    def numbers(count: int) -> Floats:
        return (drawn.standard_normal(count) * 10.0 ** drawn.integers(-6, 6, count)).astype("f4")

    call = Call(
        kind=kind,
        dtype="" if kind is CallKind.BARRIER else "float32",
        count=0 if kind in (CallKind.ALL_TO_ALL, CallKind.BARRIER) or uneven else sum(counts),
        reduction="sum" if kind in REDUCING else "",
        root=root if kind in ROOTED else None,
        tensors=max(1, len(counts)),
    )
    case = Case(places, [], [[] for _ in range(n)], [[] for _ in range(n)])
    drawing = _Drawing(case, kind, root, in_place, uneven, numbers)
    for count in () if kind is CallKind.BARRIER else counts:
        drawing.add(count)
    for rank in range(n):
        parts = tuple(
            Part(tuple(map(_bytes, gives)), tuple(map(_bytes, takes)))
            for gives, takes in case.arrays[rank]
        )
        gate = None if gates is None else gates[rank]
        case.works.append(
            Work(call=call, itemsize=ITEM, parts=parts, reduce=reduce_floats, gate=gate)
        )
    return case


@dataclass
class _Drawing:
    """Parts of a case of one kind."""

    case: Case
    kind: CallKind
    root: int
    in_place: bool
    uneven: bool
    numbers: Callable[[int], Floats]

    def sizes(self, count: int, rank: int) -> tuple[list[int], list[int]]:
        n, at_root = self.case.places.size, rank == self.root
        table = [[count + (3 * a + 5 * b) % 7 * self.uneven for b in range(n)] for a in range(n)]
        by_rank = table[0]
        return {
            CallKind.ALL_REDUCE: ([count], [count]),
            CallKind.REDUCE: ([count], [count] * at_root),
            CallKind.REDUCE_SCATTER: (by_rank, [by_rank[rank]]),
            CallKind.ALL_GATHER: ([by_rank[rank]], by_rank),
            CallKind.GATHER: ([by_rank[rank]], by_rank * at_root),
            CallKind.SCATTER: (by_rank * at_root, [by_rank[rank]]),
            CallKind.BROADCAST: ([count] * at_root, [count] * (not at_root)),
            CallKind.ALL_TO_ALL: (table[rank], [table[a][rank] for a in range(n)]),
        }[self.kind]

    def add(self, count: int) -> None:
        case, n = self.case, self.case.places.size
        for rank in range(n):
            given_sizes, taken_sizes = self.sizes(count, rank)
            gives = [self.numbers(each) for each in given_sizes]
            takes = [np.full(each, np.nan, np.float32) for each in taken_sizes]
            if self.in_place and gives and takes:
                if self.kind in (CallKind.ALL_REDUCE, CallKind.REDUCE):
                    takes[0] = gives[0]
                elif self.kind in (CallKind.REDUCE_SCATTER, CallKind.SCATTER):
                    takes[0] = gives[rank]
                elif self.kind in (CallKind.ALL_GATHER, CallKind.GATHER):
                    takes[rank] = gives[0]
            case.arrays[rank].append((gives, takes))
        given = [[each.copy() for each in case.arrays[rank][-1][0]] for rank in range(n)]
        for rank in range(n):
            takes = case.arrays[rank][-1][1]
            case.expected[rank].append(self.wanted(given, rank) if takes else None)

    def wanted(self, given: list[list[Floats]], rank: int) -> list[Floats]:
        if self.kind in (CallKind.ALL_REDUCE, CallKind.REDUCE):
            return [host_sum([each[0] for each in given], self.case.places)]
        if self.kind is CallKind.REDUCE_SCATTER:
            return [flat_sum([each[rank] for each in given])]
        if self.kind in (CallKind.ALL_GATHER, CallKind.GATHER):
            return [each[0] for each in given]
        if self.kind is CallKind.SCATTER:
            return [given[self.root][rank]]
        if self.kind is CallKind.BROADCAST:
            return [given[self.root][0]]
        return [each[rank] for each in given]


def sending(places: Places, sender: int, receiver: int, count: int, tag: int = 0) -> Case:
    """A SEND; ranks that take no part in it bring nothing."""
    call = Call(kind=CallKind.SEND, dtype="float32", count=count, tag=tag)
    values, room = np.arange(count, dtype=np.float32), np.full(count, np.nan, np.float32)
    case = Case(places, [], [[] for _ in range(places.size)], [[] for _ in range(places.size)])
    case.arrays[sender], case.expected[sender] = [([values], [])], [None]
    case.arrays[receiver], case.expected[receiver] = [([], [room])], [[values]]
    case.works = [
        Work(call=call, itemsize=ITEM, parts=(Part((_bytes(values),)),), peer=receiver),
        Work(
            call=call, itemsize=ITEM, parts=(Part((), (_bytes(room),)),), peer=sender, receives=True
        ),
    ]
    return case


def _bytes(array: Floats) -> memoryview:
    return array.view(np.uint8).data


@st.composite
def _places(draw: st.DrawFn) -> Places:
    """Up to six ranks on hosts, even or not."""
    n = draw(st.integers(1, 6))
    of = [draw(st.integers(0, n - 1)) for _ in range(n)]
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(of):
        hosts.setdefault(host, []).append(rank)
    return Places(tuple(tuple(each) for each in hosts.values()))


PLACES = st.one_of(
    _places(),
    st.sampled_from(
        [
            Places(((0, 1), (2, 3))),
            Places(((0, 3), (1, 2))),
            Places(((0, 2, 4), (1, 3, 5))),
            Places(((0, 1), (2, 3), (4, 5))),
        ]
    ),
)
"""Places of up to six ranks."""

_COUNTS = st.one_of(st.integers(0, 300), st.sampled_from([2**14, 2**14 + 1, 40_001, 100_000]))


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    places = draw(PLACES)
    return collective(
        draw(st.sampled_from(COLLECTIVES)),
        places,
        draw(st.lists(_COUNTS, min_size=1, max_size=3)),
        root=draw(st.integers(0, places.size - 1)),
        in_place=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        uneven=draw(st.booleans()),
    )


CASES = _cases()
"""Collectives of every kind, on any places, of small and large tensors, coalesced or not."""
