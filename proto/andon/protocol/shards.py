"""Shards: which positions a step takes, and which of them each rank takes (contract C-SHARD-001).

The coordinator assigns with these functions; a worker predicts its next steps with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Cursor, PositionRange

__all__ = ["Ranges", "cursor_after", "merged", "next_batch", "reassign", "shard_of", "subtract"]

Ranges = tuple[PositionRange, ...]
"""Positions as rising ranges: none is empty, and none touches the next."""


def next_batch(cursor: Cursor, global_batch: int, epoch_size: int | None) -> PositionRange:
    """The positions of the step at `cursor`: `global_batch` of them, fewer at an epoch's end.

    Args:
        cursor: the first position that is not yet committed.
        global_batch: samples in one step of the whole line.
        epoch_size: positions in an epoch; None if it is unknown, which counts as COUNT_LIMIT.
    """
    if global_batch < 1:
        raise ValueError(f"global_batch must be at least 1, not {global_batch}")
    size = _size_of(epoch_size)
    if cursor.position >= size:
        raise ValueError(f"position {cursor.position} is beyond an epoch of {size}")
    return PositionRange(cursor.position, min(cursor.position + global_batch, size))


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


def reassign(batch: PositionRange, kept: Sequence[Iterable[PositionRange]]) -> tuple[Ranges, ...]:
    """Assigns a batch again after a round was void: every rank keeps the positions that it has.

    Its gradients of those positions stay valid. The positions that no rank has go to the ranks
    with the fewest, so that shards become as equal as possible; if they don't divide, the first of
    those ranks take one more. Each rank's part of them is one run, in rank order. If no rank has
    any position, the result is that of `shard_of`.

    Args:
        batch: the positions of the step.
        kept: for each rank, its positions of the last attempt; none for a new worker.

    Returns:
        For each rank its positions: disjoint, and the whole batch together.

    Raises:
        ValueError: there are no ranks, or their positions overlap or are not of the batch.
    """
    owned = [merged(ranges) for ranges in kept]
    # Lost positions. If ranks overlap or own positions outside the batch, the sizes below do not
    # add up to the batch.
    free = subtract((batch,), (part for ranges in owned for part in ranges))
    sizes = [sum(map(len, ranges)) for ranges in owned]
    if not owned or sum(sizes) + sum(map(len, free)) != len(batch):
        raise ValueError(f"the ranks' positions overlap, or are not of {batch}")
    counts = _equalising(sizes, sum(map(len, free)))
    runs = _runs(free, counts)
    return tuple(merged((*ranges, *run)) for ranges, run in zip(owned, runs, strict=True))


def merged(ranges: Iterable[PositionRange]) -> Ranges:
    """The same positions as rising ranges: empty ones are left out, touching ones joined."""
    parts: list[PositionRange] = []
    for part in sorted(ranges):
        if parts and part.start <= parts[-1].stop:
            parts[-1] = PositionRange(parts[-1].start, max(parts[-1].stop, part.stop))
        elif len(part):
            parts.append(part)
    return tuple(parts)


def subtract(ranges: Iterable[PositionRange], taken: Iterable[PositionRange]) -> Ranges:
    """The positions of `ranges` that are not in `taken`."""
    gaps = merged(taken)
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


def _equalising(sizes: Sequence[int], free: int) -> list[int]:
    """How many of `free` positions each rank gets, as water fills the lowest places first.

    Ranks up to the size `level` are lifted to it and then share the rest; `low` counts them.
    """
    level, low = 0, 0
    for count, size in enumerate(sorted(sizes), 1):
        cost = (count - 1) * (size - level)  # positions that lift the smaller ones to this size
        if cost > free:
            break
        free -= cost
        level, low = size, count
    lift, rest = divmod(free, low)
    counts = []
    for size in sizes:
        if size > level:
            counts.append(0)
            continue
        counts.append(level - size + lift + (rest > 0))
        rest -= rest > 0
    return counts


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
