"""Shards: which positions a step takes, and which of them a rank takes (contract C-SHARD-001).

The coordinator deals with these functions; a worker foresees the next steps with the same ones.
"""

from __future__ import annotations

from andon.records import Cursor, PositionRange

__all__ = ["after", "next_batch", "share_of"]


def next_batch(cursor: Cursor, global_batch: int, dataset_size: int | None) -> PositionRange:
    """The positions of the step at `cursor`: `global_batch` of them, fewer at an epoch's end.

    Args:
        cursor: the first position that is not yet committed.
        global_batch: samples in one step of the whole line.
        dataset_size: positions in an epoch; None if they do not end.
    """
    if global_batch < 1:
        raise ValueError(f"global_batch must be at least 1, not {global_batch}")
    stop = cursor.position + global_batch
    if dataset_size is not None:
        if cursor.position >= dataset_size:
            raise ValueError(f"position {cursor.position} is beyond an epoch of {dataset_size}")
        stop = min(stop, dataset_size)
    return PositionRange(cursor.position, stop)


def after(cursor: Cursor, batch: PositionRange, dataset_size: int | None) -> Cursor:
    """The cursor once `batch`, which began at `cursor`, is committed or skipped."""
    if batch.start != cursor.position:
        raise ValueError(f"a batch at {batch.start} does not begin at the cursor {cursor}")
    if dataset_size is not None and batch.stop >= dataset_size:
        return Cursor(cursor.epoch + 1, 0)
    return Cursor(cursor.epoch, batch.stop)


def share_of(batch: PositionRange, rank: int, world_size: int) -> PositionRange:
    """Rank `rank`'s contiguous share of `batch`: shares differ by at most one position.

    The first `len(batch) % world_size` ranks take one more. A share is empty if there are fewer
    positions than ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not below the world size {world_size}")
    base, rest = divmod(len(batch), world_size)
    start = batch.start + rank * base + min(rank, rest)
    return PositionRange(start, start + base + (rank < rest))
