"""Shares step after step, and feeders that leave no process behind, for tests of feeders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from andon.protocol.records import Cursor
from andon.protocol.shards import cursor_after, next_batch, shard_of
from andon_trainer.data.feed import Feeder, Share

__all__ = ["BATCH", "SEED", "START", "as_list", "nothing", "opened", "shares"]

BATCH, SEED = 4, 5
START = Cursor(0, 0)

AnyFeeder = TypeVar("AnyFeeder", bound=Feeder)


def as_list(samples: list[Any]) -> list[Any]:
    """Collates nothing."""
    return samples


def shares(
    rank: int = 0, world_size: int = 1, start: Cursor = START, *, size: int | None
) -> Iterator[Share]:
    """A rank's shares of epochs of so many samples, or of one that nobody knows the end of."""
    cursor = start
    while True:
        batch = next_batch(cursor, BATCH, size)
        yield Share(cursor.epoch, (shard_of(batch, rank, world_size),), batch=batch)
        cursor = cursor_after(cursor, batch, size)


def nothing() -> Iterator[Share]:
    """Foresees no share."""
    return iter(())


class Opening(Protocol):
    """Opens a feeder."""

    def __call__(self, feeder: AnyFeeder, /) -> AnyFeeder: ...


@contextmanager
def opened() -> Iterator[Opening]:
    """Opens feeders, and closes them at the end."""
    made: list[Feeder] = []

    def open_(feeder: AnyFeeder, /) -> AnyFeeder:
        made.append(feeder)
        feeder.open()
        return feeder

    yield open_
    for feeder in made:
        feeder.close()
    assert multiprocessing.active_children() == []
