"""Names targets, and divides the batch equally."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split, reassign
from andon_coordinator.core import progress
from conformance.breaking import serve_with


def equally(
    batch: PositionRange, kept: Sequence[Iterable[PositionRange]], split: Split
) -> tuple[Ranges, ...]:
    return reassign(batch, kept, Split(interleaved=split.interleaved))


if __name__ == "__main__":
    sys.argv += ["--shares", "balanced"]
    serve_with((progress, "reassign", equally))
