"""How a batch is divided among ranks, as docs/protocol-servers.md, section 21, defines it: one
position at a time, with exact fractions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

__all__ = ["shares_file"]

_LARGE = 2**32 - 1
"""The greatest target."""

Shares = list[list[int]]
"""For each rank its positions, in rising order."""


def shares_file() -> dict[str, bytes]:
    """`shares.json`: first assignments, and assignments after a void round."""
    about = (
        "Shares of a batch; docs/protocol-servers.md, Assigning samples. Ranges are [start, stop). "
        "kept has what each rank had in the attempt before: nothing in a first assignment, and "
        "nothing of a new worker. No targets: equal ones."
    )
    cases = ",\n    ".join(json.dumps(case) for case in (*_first(), *_again()))
    text = f'{{\n  "description": {json.dumps(about)},\n  "shares": [\n    {cases}\n  ]\n}}\n'
    return {"shares.json": text.encode()}


def _first() -> list[dict[str, Any]]:
    cases = [
        ("equal, with a rest", (0, 11), (), 3),
        ("equal, fewer positions than ranks", (40, 42), (), 4),
        ("one rank", (7, 12), (9,), 1),
        ("seven to three", (0, 10), (7, 3), 2),
        ("the lowest rank wins a tie", (0, 4), (3, 3, 2), 3),
        ("nobody is left out: the great target waits", (100, 104), (20, 1, 1), 3),
        ("fewer positions than ranks: the greatest targets first", (0, 2), (1, 5, 3), 3),
        ("parts of ten thousand", (512, 576), (5234, 3017, 1249, 500), 4),
        ("the greatest and the least target", (0, 9), (_LARGE, 1, _LARGE - 1), 3),
    ]
    return [
        _case(name, batch, targets, interleaved, [[] for _ in range(ranks)])
        for name, batch, targets, ranks in cases
        for interleaved in (False, True)
    ]


def _again() -> list[dict[str, Any]]:
    """Worker 1 of the roster is lost, or replaced by a new one; or a new one comes in addition."""
    cases = []
    for interleaved in (False, True):
        equal = _dealt((0, 12), (), interleaved, [[], [], []])
        uneven = _dealt((64, 96), (4, 2, 1, 1), interleaved, [[], [], [], []])
        cases += [
            _case("equal, rank 1 is lost", (0, 12), (), interleaved, [equal[0], equal[2]]),
            _case("equal, nobody is lost", (0, 12), (), interleaved, equal),
            _case("equal, one more came: nothing is free", (0, 12), (), interleaved, [*equal, []]),
            _case(
                "equal, another worker in place of rank 1",
                (0, 12),
                (),
                interleaved,
                [equal[0], [], equal[2]],
            ),
            _case(
                "uneven, rank 1 is lost",
                (64, 96),
                (4, 1, 1),
                interleaved,
                [uneven[0], *uneven[2:]],
            ),
            _case(
                "uneven, the fastest is lost, and a newcomer has a usual target",
                (64, 96),
                (2, 1, 1, 1),
                interleaved,
                [*uneven[1:], []],
            ),
            _case(
                "rank 0 has more than its part already",
                (0, 20),
                (1, 9),
                interleaved,
                [list(range(4, 14)), [0, 1]],
            ),
        ]
    return cases


def _case(
    name: str,
    batch: tuple[int, int],
    targets: Sequence[int],
    interleaved: bool,
    kept: Shares,
) -> dict[str, Any]:
    shares = _dealt(batch, targets, interleaved, kept)
    assert sorted(at for share in shares for at in share) == list(range(*batch)), name
    return {
        "name": f"{name}, {'interleaved' if interleaved else 'contiguous'}",
        "batch": list(batch),
        "targets": list(targets),
        "interleaved": interleaved,
        "kept": [_ranges(each) for each in kept],
        "shares": [_ranges(each) for each in shares],
    }


def _dealt(
    batch: tuple[int, int], targets: Sequence[int], interleaved: bool, kept: Shares
) -> Shares:
    targets = targets or [1] * len(kept)
    taken = {position for share in kept for position in share}
    free = [position for position in range(*batch) if position not in taken]
    sizes = [len(share) for share in kept]
    handed: Shares = [[] for _ in kept]
    for position in free:
        rank = _next(sizes, targets)
        sizes[rank] += 1
        handed[rank].append(position)
    if not interleaved:
        rest = iter(free)
        handed = [[next(rest) for _ in run] for run in handed]
    return [sorted([*old, *new]) for old, new in zip(kept, handed, strict=True)]


def _next(sizes: Sequence[int], targets: Sequence[int]) -> int:
    """The rank that gets the next position."""
    ranks = range(len(sizes))
    if 0 in sizes:
        return max((r for r in ranks if not sizes[r]), key=lambda r: (targets[r], -r))
    return min(ranks, key=lambda r: (Fraction(2 * sizes[r] + 1, targets[r]), r))


def _ranges(positions: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1][1] += 1
        else:
            ranges.append([position, position + 1])
    return ranges
