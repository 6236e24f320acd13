"""A storm among the ranks of process groups: calls, groups and one fault, all drawn from a seed.

Every rank computes the same plan. Its calls come in windows: a rank begins all of its calls of a
window, those of each group in their order but groups among each other in an order of its own, and
then waits for all of them. So no rank waits for a call that another one does not begin, and yet two
ranks begin two groups' calls in different order.

Values are small integers, so that every reduction is exact in every order and in every type.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["DTYPES", "FAULTS", "KINDS", "Fault", "Operation", "Plan", "plan_storm", "turns_of"]

KINDS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"),
    *("reduce_scatter", "all_to_all", "barrier", "send"),
)
DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")
FAULTS = ("none", "kill", "freeze", "raise", "leave", "kill the service")
_COUNTS = (1, 7, 257, 5_000, 5_000, 40_000, 200_000)
_BIG = 1_500_000
_IN_A_WINDOW = 6


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of one group."""

    number: int
    """Its place in the plan; what it moves is drawn from it."""
    group: int
    kind: str
    dtype: str
    count: int
    root: int
    """The index of the root, or of the sender, in the group."""
    reduction: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What a rank does in the middle of a window."""

    kind: str
    """One of FAULTS."""
    rank: int
    window: int
    after: int
    """How many of its calls of that window it has begun."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups as ranks of the whole, the windows of calls, and the fault."""

    seed: int
    groups: tuple[tuple[int, ...], ...]
    windows: tuple[tuple[Operation, ...], ...]
    fault: Fault


def plan_storm(seed: int, ranks: int, windows: int, fault: str) -> Plan:
    """The plan of a seed; the first group has all ranks."""
    chance = random.Random(seed)
    groups = [tuple(range(ranks))]
    for _ in range(3):
        members = chance.sample(range(ranks), chance.randint(2, ranks))
        groups.append(tuple(sorted(members)))
    planned = tuple(
        tuple(_drawn(chance, number, groups) for number in range(at, at + _IN_A_WINDOW))
        for at in range(0, windows * _IN_A_WINDOW, _IN_A_WINDOW)
    )
    when = Fault(
        kind=fault,
        rank=chance.randrange(ranks),
        window=chance.randrange(1, windows - 1),
        after=chance.randrange(_IN_A_WINDOW),
    )
    return Plan(seed, tuple(groups), planned, when)


def _drawn(chance: random.Random, number: int, groups: list[tuple[int, ...]]) -> Operation:
    group = chance.randrange(len(groups))
    return Operation(
        number=number,
        group=group,
        kind=chance.choice(KINDS),
        dtype=chance.choice(DTYPES),
        count=_BIG if chance.random() < 0.03 else chance.choice(_COUNTS),
        root=chance.randrange(len(groups[group])),
        reduction=chance.choice(("SUM", "SUM", "MAX", "MIN")),
    )


def turns_of(plan: Plan, rank: int, window: int) -> tuple[list[Operation], list[int]]:
    """A rank's calls of a window in the order in which it begins them, and in which it waits."""
    chance = random.Random(f"{plan.seed}-{rank}-{window}")
    queues: dict[int, list[Operation]] = {}
    for each in plan.windows[window]:
        if rank in plan.groups[each.group]:
            queues.setdefault(each.group, []).append(each)
    order = [group for group, queue in queues.items() for _ in queue]
    chance.shuffle(order)
    begun = [queues[group].pop(0) for group in order]
    waits = list(range(len(begun)))
    chance.shuffle(waits)
    return begun, waits
