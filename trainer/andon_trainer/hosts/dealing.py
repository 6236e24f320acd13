"""Dealing: which of a host's grains each of its processes computes.

Theory of operation. To the line a host is one worker, whose share is some grains of a batch. They
are cut into a run for each process, in rising order, as equal as can be. Which process computes a
grain changes no bit. It changes how much a process has to hand over, which is one sum for each of
its maximal nodes: so runs end where the tree does, as long as no process has more to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from andon.protocol.grains import cover
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, merged

__all__ = ["deal_grains"]


@lru_cache(maxsize=256)
def deal_grains(share: Ranges, count: int, processes: int) -> tuple[Ranges, ...]:
    """The grains of each process of a host, all of the share and each of them once.

    No process has more than the share's grains over the processes, rounded up. If there are enough,
    each has one at least; otherwise the first processes have one each.

    Args:
        share: the host's grains, in rising order.
        count: those of the batch.
        processes: how many there are.
    """
    grains = [grain for part in share for grain in range(part.start, part.stop)]
    cuts = [min(number, len(grains)) for number in range(processes + 1)]
    if len(grains) > processes:
        even = [len(grains) * number // processes for number in range(processes + 1)]
        cuts = min(even, _aligned(grains, even), key=lambda each: _nodes(grains, each, count))
    return tuple(_runs(grains[start:stop]) for start, stop in pairwise(cuts))


def _aligned(grains: Sequence[int], even: Sequence[int]) -> list[int]:
    """Cuts, as indices of `grains`, where the greatest powers of two are."""
    processes, total = len(even) - 1, len(grains)
    most = -(-total // processes)
    cuts = [0]
    for number in range(1, processes):
        later = processes - number
        found = range(
            max(cuts[-1] + 1, total - later * most), min(cuts[-1] + most, total - later) + 1
        )
        ends = {at: _alignment(grains, at) for at in found}
        cuts.append(min(found, key=lambda at: (-ends[at], abs(at - even[number]), at)))
    return [*cuts, total]


def _alignment(grains: Sequence[int], at: int) -> int:
    """How good a place to cut is in front of an index: a gap is the best."""
    first = grains[at]
    return first & -first if grains[at - 1] + 1 == first else 1 << 62


def _nodes(grains: Sequence[int], cuts: Sequence[int], count: int) -> int:
    """How many maximal nodes the processes have together."""
    return sum(len(cover(_runs(grains[start:stop]), count)) for start, stop in pairwise(cuts))


def _runs(grains: Sequence[int]) -> Ranges:
    return merged(PositionRange(grain, grain + 1) for grain in grains)
