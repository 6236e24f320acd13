"""Shards: which positions a step takes, and which of them each rank takes (contract C-SHARD-001).

The coordinator assigns with these functions; a worker predicts its next steps with the same ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Cursor, PositionRange

__all__ = [
    "Ranges",
    "Split",
    "cursor_after",
    "deal",
    "divide",
    "hand_out",
    "merged",
    "next_batch",
    "reassign",
    "shard_of",
    "subtract",
]

Ranges = tuple[PositionRange, ...]
"""Positions as rising ranges: none is empty, and none touches the next."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a batch is divided among ranks; the default gives equal, contiguous shares."""

    targets: tuple[int, ...] = ()
    """For each rank a whole number from 1: shares are in proportion to these. Empty: equal."""
    interleaved: bool = False
    """Whether neighbouring positions go to different ranks, rather than one run to each."""

    def __post_init__(self) -> None:
        """Refuses targets that the wire can't hold."""
        if not all(0 < target < 2**32 for target in self.targets):
            raise ValueError(f"targets are numbers from 1 below 2**32, not {self.targets}")

    def targets_of(self, world_size: int) -> tuple[int, ...]:
        """A target for each rank.

        Raises:
            ValueError: the split is for another number of ranks.
        """
        if not self.targets:
            return (1,) * world_size
        if len(self.targets) != world_size:
            raise ValueError(f"a split of {len(self.targets)} targets for {world_size} ranks")
        return self.targets


_EQUAL = Split()


def next_batch(cursor: Cursor, size: int, epoch_size: int | None) -> PositionRange:
    """The positions of the step at `cursor`: `size` of them, fewer at an epoch's end.

    Args:
        cursor: the first position that is not yet committed.
        size: samples in one step of the whole line: the run's `global_batch`, or more.
        epoch_size: positions in an epoch; None if it is unknown, which counts as COUNT_LIMIT.
    """
    if size < 1:
        raise ValueError(f"a step takes at least 1 position, not {size}")
    end = _size_of(epoch_size)
    if cursor.position >= end:
        raise ValueError(f"position {cursor.position} is beyond an epoch of {end}")
    return PositionRange(cursor.position, min(cursor.position + size, end))


def cursor_after(cursor: Cursor, batch: PositionRange, epoch_size: int | None) -> Cursor:
    """The cursor after `batch`, which begins at `cursor`, was committed or skipped."""
    if batch.start != cursor.position:
        raise ValueError(f"a batch at {batch.start} does not begin at the cursor {cursor}")
    if batch.stop >= _size_of(epoch_size):
        return Cursor(cursor.epoch + 1, 0)
    return Cursor(cursor.epoch, batch.stop)


def _size_of(epoch_size: int | None) -> int:
    """Positions in an epoch. A stream of unknown length has an end, too, since a journal can't hold
    positions from COUNT_LIMIT on."""
    return COUNT_LIMIT if epoch_size is None else epoch_size


def shard_of(batch: PositionRange, rank: int, world_size: int) -> PositionRange:
    """Rank `rank`'s contiguous shard of `batch`. Shards differ by at most one position.

    The first `len(batch) % world_size` ranks take one more. If there are fewer positions than
    ranks, the last ranks' shards are empty.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not below the world size {world_size}")
    base, rest = divmod(len(batch), world_size)
    start = batch.start + rank * base + min(rank, rest)
    return PositionRange(start, start + base + (rank < rest))


def deal(batch: PositionRange, split: Split, world_size: int) -> tuple[Ranges, ...]:
    """The share of each rank when a batch is assigned for the first time.

    The positions are handed out one after another. The next one goes to a rank that has none yet,
    the one with the greatest target first; if all have one, to the rank with the least
    `(2 * size + 1) / target`. The lowest rank wins a tie. So shares are rounded half up (Webster's
    method), equal targets give the shares of `shard_of`, and nobody is left out unless there are
    fewer positions than ranks.

    A contiguous split keeps the sizes, and gives each rank one run, in rank order.

    Raises:
        ValueError: the split is for another number of ranks.
    """
    return reassign(batch, [()] * world_size, split)


def reassign(
    batch: PositionRange, kept: Sequence[Iterable[PositionRange]], split: Split = _EQUAL
) -> tuple[Ranges, ...]:
    """Assigns a batch again after a round was void: every rank keeps the positions that it has.

    Its gradients of those positions stay valid. The positions that no rank has are handed out by
    the rule of `deal`, which goes on from the sizes that the ranks have.

    Args:
        batch: the positions of the step.
        kept: for each rank, its positions of the last attempt; none for a new worker.
        split: how shares compare.

    Returns:
        For each rank its positions: disjoint, and the whole batch together.

    Raises:
        ValueError: there are no ranks, their positions overlap or are not of the batch, or the
            split is for another number of ranks.
    """
    if kept and not any(kept):
        return _handed_out(merged((batch,)), [()] * len(kept), split)  # As in most steps.
    owned = [merged(ranges) for ranges in kept]
    # Lost positions. If ranks overlap or own positions outside the batch, the sizes below do not
    # add up to the batch.
    free = subtract((batch,), (part for ranges in owned for part in ranges))
    sizes = (sum(map(len, ranges)) for ranges in owned)
    if not owned or sum(sizes) + sum(map(len, free)) != len(batch):
        raise ValueError(f"the ranks' positions overlap, or are not of {batch}")
    return _handed_out(free, owned, split)


def hand_out(
    free: Ranges, kept: Sequence[Iterable[PositionRange]], split: Split = _EQUAL
) -> tuple[Ranges, ...]:
    """Hands out free positions by the rule of `deal`, to ranks that keep what they have.

    Args:
        free: the positions, none of which a rank has.
        kept: for each rank, its positions.
        split: how shares compare.

    Raises:
        ValueError: the split is for another number of ranks.
    """
    return _handed_out(free, [merged(ranges) for ranges in kept], split)


def _handed_out(free: Ranges, owned: Sequence[Ranges], split: Split) -> tuple[Ranges, ...]:
    sizes, count = [sum(map(len, ranges)) for ranges in owned], sum(map(len, free))
    targets = split.targets_of(len(owned))
    if split.interleaved:
        runs = _interleaved(free, sizes, targets)
    else:
        runs = list(_runs(free, _grants(sizes, targets, count)))
    return tuple(merged((*ranges, *run)) for ranges, run in zip(owned, runs, strict=True))


def divide(ranges: Iterable[PositionRange], parts: int) -> Iterator[Ranges]:
    """The positions in `parts` consecutive parts, whose sizes differ by at most one.

    The first parts take one more. A part may consist of several ranges.
    """
    whole = merged(ranges)
    base, rest = divmod(sum(map(len, whole)), parts)
    for run in _runs(whole, [base + (part < rest) for part in range(parts)]):
        yield tuple(run)


def merged(ranges: Iterable[PositionRange]) -> Ranges:
    """The same positions as rising ranges: empty ones are left out, touching ones joined."""
    rising = sorted(ranges)
    if len(rising) <= 1:
        return tuple(rising) if rising and rising[0] else ()
    parts: list[PositionRange] = []
    for part in rising:
        if parts and part.start <= parts[-1].stop:
            parts[-1] = PositionRange(parts[-1].start, max(parts[-1].stop, part.stop))
        elif len(part):
            parts.append(part)
    return tuple(parts)


def subtract(ranges: Iterable[PositionRange], taken: Iterable[PositionRange]) -> Ranges:
    """The positions of `ranges` that are not in `taken`."""
    gaps = merged(taken)
    if not gaps:
        return merged(ranges)
    left: list[PositionRange] = []
    for part in merged(ranges):
        start = part.start
        for gap in gaps:
            if gap.stop <= start or gap.start >= part.stop:
                continue
            left.append(PositionRange(start, max(start, gap.start)))
            start = min(gap.stop, part.stop)
        left.append(PositionRange(start, part.stop))
    return merged(left)


def _grants(sizes: Sequence[int], targets: Sequence[int], free: int) -> list[int]:
    """How many of `free` positions each rank gets by the rule of `deal`."""
    now = list(sizes)
    if free > len(sizes):
        free -= _raise_together(now, targets, free)
    for rank in _order(now, targets, free):
        now[rank] += 1
    return [size - before for size, before in zip(now, sizes, strict=True)]


def _raise_together(now: list[int], targets: Sequence[int], free: int) -> int:
    """Hands out positions that the rule gives before the last few; returns how many.

    All grants with `(size + 1/2) / target <= level` come before all others, so every rank can be
    raised to `floor(level * target + 1/2)` at once. The level is chosen such that this takes less
    than `free` positions: it would take `free - len(now)` without rounding.
    """
    given = 0
    for rank, size in enumerate(now):
        if size == 0:
            now[rank], given = 1, given + 1
    spare = free - given - len(now)
    active = list(range(len(now)))
    while spare > 0:
        # level = top / bottom; ranks that are above it already do not take part.
        top, bottom = spare + sum(now[i] for i in active), sum(targets[i] for i in active)
        below = [i for i in active if now[i] * bottom < top * targets[i]]
        if len(below) < len(active):
            active = below
            continue
        for i in active:
            raised = max(now[i], (2 * top * targets[i] + bottom) // (2 * bottom))
            given += raised - now[i]
            now[i] = raised
        break
    return given


def _order(sizes: Sequence[int], targets: Sequence[int], count: int) -> Iterator[int]:
    """The ranks that get the next `count` positions, one after another."""
    equal = len(set(targets)) == 1  # Whole numbers are compared much faster than fractions.

    def key(size: int, rank: int) -> tuple[bool, int | Fraction, int, int]:
        share = 2 * size + 1 if equal else Fraction(2 * size + 1, targets[rank])
        return size > 0, share, rank, size

    if not count:
        return
    heap = [key(size, rank) for rank, size in enumerate(sizes)]
    heapq.heapify(heap)
    for _ in range(count):
        _, _, rank, size = heap[0]
        heapq.heapreplace(heap, key(size + 1, rank))
        yield rank


def _interleaved(
    free: Ranges, sizes: Sequence[int], targets: Sequence[int]
) -> list[list[PositionRange]]:
    """`free` handed out position by position."""
    runs: list[list[PositionRange]] = [[] for _ in sizes]
    order = _order(sizes, targets, sum(map(len, free)))
    for part in free:
        for position in range(part.start, part.stop):
            runs[next(order)].append(PositionRange(position, position + 1))
    return runs


def _runs(free: Ranges, counts: Sequence[int]) -> Iterator[list[PositionRange]]:
    """`free` divided into one run of positions for each count, in order."""
    parts = list(reversed(free))
    for count in counts:
        run = []
        while count:
            part = parts.pop()
            end = min(part.stop, part.start + count)
            run.append(PositionRange(part.start, end))
            count -= end - part.start
            if end < part.stop:
                parts.append(PositionRange(end, part.stop))
        yield run
