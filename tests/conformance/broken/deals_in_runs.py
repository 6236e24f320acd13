"""Says that shares are interleaved, and gives each rank one run of positions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split, reassign
from andon_coordinator.core import progress
from conformance.breaking import serve_with


def in_runs(
    batch: PositionRange, kept: Sequence[Iterable[PositionRange]], split: Split
) -> tuple[Ranges, ...]:
    return reassign(batch, kept, Split(split.targets))


if __name__ == "__main__":
    sys.argv += ["--shares", "interleaved"]
    serve_with((progress, "reassign", in_runs))
