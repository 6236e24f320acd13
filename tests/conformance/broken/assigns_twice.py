"""Assigns the whole batch to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split
from andon_coordinator.core import progress
from conformance.breaking import serve_with


def whole(
    batch: PositionRange, kept: Sequence[Iterable[PositionRange]], _split: Split
) -> tuple[Ranges, ...]:
    return tuple((batch,) for _ in kept)


if __name__ == "__main__":
    serve_with((progress, "reassign", whole))
