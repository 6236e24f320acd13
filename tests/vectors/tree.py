"""The tree over grains and means along it, as docs/protocol-same-bits.md defines them: element by
element, with exact fractions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from vectors.floats import FLOAT32, Number

__all__ = ["tree_file"]

Case = dict[str, Any]
Span = tuple[int, int]
"""A node: its first grain, and one past its last."""

_ABSENT = FLOAT32.sign
"""-0.0."""


def tree_file() -> dict[str, bytes]:
    """`tree.json`: nodes of trees, covers of shares, and means."""
    about = (
        "The tree over grains; docs/protocol-same-bits.md. Nodes and runs of grains are "
        "[first, stop). Payloads are float32, hexadecimal, as they travel. in_order, where it is "
        "there, is what adding grain after grain would give, and fused what that would give with "
        "a fused multiply-add: wrong ones."
    )
    parts = {
        "trees": [{"grains": count, "nodes": list(_nodes((0, count)))} for count in _COUNTS],
        "covers": [_cover(*each) for each in _SHARES],
        "means": list(_means()),
    }
    lists = ",\n".join(
        f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, cases)) + "\n  ]"
        for name, cases in parts.items()
    )
    return {"tree.json": f'{{\n  "description": {json.dumps(about)},\n{lists}\n}}\n'.encode()}


_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)

_SHARES: tuple[tuple[str, int, list[Span]], ...] = (
    ("everything", 11, [(0, 11)]),
    ("nothing", 11, []),
    ("a quarter of a power of two", 16, [(4, 8)]),
    ("the first third", 12, [(0, 4)]),
    ("the second third", 12, [(4, 8)]),
    ("the last third", 12, [(8, 12)]),
    ("a run that begins and ends within nodes", 16, [(3, 11)]),
    ("after a loss: two runs that join to a node", 16, [(0, 4), (4, 6), (6, 8)]),
    ("after a loss: a run and single grains", 13, [(0, 3), (7, 8), (12, 13)]),
    ("all but the first grain", 7, [(1, 7)]),
)


def _middle(span: Span) -> int:
    """Where a node of several grains is divided."""
    first, stop = span
    size = 1
    while 2 * size < stop - first:
        size *= 2
    return first + size


def _nodes(span: Span) -> Iterator[Span]:
    """A node and all below it: a node before its children, the left child first."""
    yield span
    first, stop = span
    if stop - first > 1:
        yield from _nodes((first, _middle(span)))
        yield from _nodes((_middle(span), stop))


def _maximal(count: int, owned: set[int]) -> list[Span]:
    """The nodes that are owned whole, and whose parent is not."""
    found: list[Span] = []
    for first, stop in _nodes((0, count)):
        whole = owned.issuperset(range(first, stop))
        if whole and not any(a <= first and stop <= b for a, b in found):
            found.append((first, stop))
    return sorted(found)


def _cover(name: str, count: int, runs: list[Span]) -> Case:
    owned = {grain for first, stop in runs for grain in range(first, stop)}
    return {"name": name, "grains": count, "runs": runs, "nodes": _maximal(count, owned)}


Leaf = tuple[float, list[int]]
"""A grain's weight, and the bits of its gradient."""


def _means() -> Iterator[Case]:
    full: list[Leaf] = [(4.0, _ordinary(seed)) for seed in range(5)]
    yield _mean("one full grain", 4, [full[0]], [[0]])
    yield _mean("one short grain: its gradient, neither multiplied nor divided", 4, _at(3.0), [[0]])
    yield _mean("one grain of many tokens", 4, _at(1711.0), [[0]])
    yield _mean("two grains of one rank", 4, full[:2], [[0, 1]])
    yield _mean("two grains of two ranks", 4, full[:2], [[0], [1]])
    yield _mean(
        "five grains, the last one short", 4, [*full[:4], (1.0, full[4][1])], [[0, 1, 2], [3, 4]]
    )
    shares: list[list[int]]
    for shares in ([[0, 1, 2, 3, 4]], [[1, 2], [0, 3], [4]], [[4], [3, 2], [1], [0]]):
        yield _mean(f"the same bits: shares {shares}", 4, full, shares)
    yield _mean("weights are tokens", 4, _weighing(911, 7, 1024, 1, 500), [[0, 1], [2, 3, 4]])
    uneven = _weighing(1, 1e16, 1, 1, 1)
    yield _mean("the sum of the weights is the tree's", 2, uneven, [[0, 1], [2], [3, 4]])
    without = [full[0], (0.0, []), full[2], (0.0, [])]
    yield _mean("grains of weight 0 are -0.0", 4, without, [[0], [1, 2], [3]])
    yield _mean("a rank whose grains all have weight 0", 4, without, [[0, 2], [1, 3]])
    yield _mean("all grains have weight 0: zeros, undivided", 4, [(0.0, [])] * 3, [[0], [1, 2]])
    great, small = FLOAT32.of(2.0**24), FLOAT32.of(1.0)
    cancels = [
        [great, small],
        [small, great],
        [small, great ^ FLOAT32.sign],
        [great ^ FLOAT32.sign, small],
    ]
    yield _mean(
        "cancellation: the tree shows", 1, [(1.0, bits) for bits in cancels], [[0, 1], [2, 3]]
    )
    top = FLOAT32.infinity - 1
    halves = [top, top - 1, FLOAT32.sign | top, 1]
    yield _mean(
        "near overflow", 8, [(2.0, halves), (2.0, halves[::-1]), (1.0, halves)], [[0], [1, 2]]
    )
    tiny = [1, 2, 3, FLOAT32.sign | 1, (1 << 23) - 1, 1 << 23]
    yield _mean("subnormals", 4, [(4.0, tiny), (3.0, tiny[::-1]), (4.0, tiny)], [[0], [1], [2]])
    zeros = [0, FLOAT32.sign, 0, FLOAT32.sign]
    yield _mean(
        "an absent component stays -0.0", 4, [(4.0, zeros), (4.0, [_ABSENT] * 4)], [[0], [1]]
    )


def _at(weight: float) -> list[Leaf]:
    return [(weight, _ordinary(9))]


def _weighing(*weights: float) -> list[Leaf]:
    return [(float(weight), _ordinary(seed + 20)) for seed, weight in enumerate(weights)]


def _mean(name: str, grain: int, leaves: Sequence[Leaf], shares: Sequence[Sequence[int]]) -> Case:
    count = len(leaves)
    elements = max(len(bits) for _, bits in leaves) or 3
    root, total = _sum(leaves, (0, count), grain, elements), _weight(leaves, (0, count))
    case: Case = {
        "name": name,
        "grain": grain,
        "grains": [
            {"weight": weight, "gradient": FLOAT32.pack(bits).hex()} for weight, bits in leaves
        ],
        "element_count": elements,
        "ranks": [
            [
                {
                    "node": span,
                    "weight": _weight(leaves, span),
                    "payload": FLOAT32.pack(_sum(leaves, span, grain, elements)).hex(),
                }
                for span in _maximal(count, set(share))
            ]
            for share in shares
        ],
        "answer": {
            "contributors": sum(len(_maximal(count, set(share))) for share in shares),
            "total_weight": total,
            "payload": FLOAT32.pack(_divided(root, total, grain, count)).hex(),
        },
    }
    for wrong in ("in_order", "fused"):
        other = _one_after_another(leaves, grain, elements, fused=wrong == "fused")
        if (bits := _divided(other, total, grain, count)) != _divided(root, total, grain, count):
            case[wrong] = FLOAT32.pack(bits).hex()
    return case


def _sum(leaves: Sequence[Leaf], span: Span, grain: int, elements: int) -> list[int]:
    """A node's bits."""
    first, stop = span
    if stop - first == 1:
        return [FLOAT32.round(each) for each in _leaf(leaves, first, grain, elements)]
    left = _sum(leaves, (first, _middle(span)), grain, elements)
    right = _sum(leaves, (_middle(span), stop), grain, elements)
    return [
        FLOAT32.round(FLOAT32.read(one).plus(FLOAT32.read(other)))
        for one, other in zip(left, right, strict=True)
    ]


def _leaf(leaves: Sequence[Leaf], index: int, grain: int, elements: int) -> list[Number]:
    """A grain's products, not rounded."""
    weight, bits = leaves[index]
    if not weight:
        return [FLOAT32.read(_ABSENT)] * elements
    factor = Number(False, Fraction(1)) if len(leaves) == 1 else _float32(weight / grain)
    return [factor.times(FLOAT32.read(each)) for each in bits]


def _weight(leaves: Sequence[Leaf], span: Span) -> float:
    first, stop = span
    if stop - first == 1:
        return leaves[first][0]
    return _weight(leaves, (first, _middle(span))) + _weight(leaves, (_middle(span), stop))


def _divided(root: Sequence[int], total: float, grain: int, count: int) -> list[int]:
    if not total:
        return [0] * len(root)
    if count == 1:
        return list(root)
    divisor = _float32(total / grain)
    assert divisor.size
    means = []
    for bits in root:
        number = FLOAT32.read(bits)
        assert number.size is not None
        means.append(FLOAT32.round(Number(number.negative, number.size / divisor.size)))
    return means


def _one_after_another(
    leaves: Sequence[Leaf], grain: int, elements: int, *, fused: bool
) -> list[int]:
    """The grains added in their order; or the tree's order of leaves with fused products."""
    total = [FLOAT32.round(each) for each in _leaf(leaves, 0, grain, elements)]
    for index in range(1, len(leaves)):
        terms = _leaf(leaves, index, grain, elements)
        if not fused:
            terms = [FLOAT32.rounded(each) for each in terms]
        total = [
            FLOAT32.round(FLOAT32.read(bits).plus(term))
            for bits, term in zip(total, terms, strict=True)
        ]
    return total


def _float32(quotient: float) -> Number:
    """float32 of a quotient that was taken in float64."""
    return FLOAT32.rounded(Number(False, Fraction(quotient)))


def _ordinary(seed: int) -> list[int]:
    """Six numbers between 2^-4 and 2^4, of both signs, with all bits of their fractions."""
    draw = random.Random(f"tree {seed}")
    return [
        draw.getrandbits(1) << 31 | (123 + draw.randrange(8)) << 23 | draw.getrandbits(23)
        for _ in range(6)
    ]
