"""A rank of a storm among process groups: it makes the plan's calls, and compares every result."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from chaos.peer_plan import Operation, Plan, plan_storm, turns_of

WRONG = 9
"""Exit code at a result that is not what the plan's values give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The parameters of a rank."""

    seed: int
    ranks: int
    windows: int
    fault: str
    rank: int
    backend: str
    store: str
    """A file in which the ranks meet."""
    service: int
    """The process of the service."""
    log: str
    """Where it says how far it is: a line for each window that ended."""


@dataclass(frozen=True, slots=True)
class Open:
    """A call that has begun."""

    operation: Operation
    works: list[dist.Work | None]
    results: list[tuple[Tensor, Tensor]]
    """What it brings, and what that has to be."""


class Rank:
    """One process's groups, and its calls in them."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self.plan: Plan = plan_storm(spec.seed, spec.ranks, spec.windows, spec.fault)
        dist.init_process_group(
            spec.backend, f"file://{spec.store}", rank=spec.rank, world_size=spec.ranks
        )
        self._groups = [dist.new_group(list(ranks)) for ranks in self.plan.groups]

    def run(self) -> None:
        """Makes all calls."""
        fault = self.plan.fault
        with Path(self._spec.log).open("w") as log:
            for window in range(self._spec.windows):
                turns, waits = turns_of(self.plan, self._spec.rank, window)
                strikes = window == fault.window and self._spec.rank == fault.rank
                begun: list[Open] = []
                for number, operation in enumerate(turns):
                    if strikes and number == fault.after:
                        self._strike()
                    begun.append(self._begin(operation))
                if strikes and fault.after >= len(turns):
                    self._strike()
                for index in waits:
                    self._finish(begun[index])
                log.write(f"{window}\n")
                log.flush()
        dist.destroy_process_group()

    def _strike(self) -> None:
        match self.plan.fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("planned")
            case "leave":
                sys.exit(0)
            case "kill the service":
                os.kill(self._spec.service, signal.SIGKILL)

    def _begin(self, operation: Operation) -> Open:
        group = self._groups[operation.group]
        ranks = self.plan.groups[operation.group]
        me = ranks.index(self._spec.rank)
        if operation.kind == "send":
            return _send(operation, group, ranks, me)
        return _CALLS[operation.kind](operation, group, len(ranks), me)

    def _finish(self, call: Open) -> None:
        for work in call.works:
            assert work is not None, "this rank is no member of the group"
            work.wait()
        for result, expected in call.results:
            if not torch.equal(result, expected):
                sys.stderr.write(f"rank {self._spec.rank}: wrong result of {call.operation}\n")
                sys.stderr.flush()
                os._exit(WRONG)


def values(operation: Operation, member: int, count: int, part: int = 0) -> Tensor:
    """What a member of the group brings to a call, or one part of that."""
    chance = np.random.default_rng([operation.number, member, part])
    low = 0 if operation.dtype == "uint8" else -8
    numbers = torch.from_numpy(chance.integers(low, 9, count))
    return numbers.to(getattr(torch, operation.dtype))


def _reduced(operation: Operation, inputs: list[Tensor]) -> Tensor:
    both: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
    }
    return reduce(both[operation.reduction], inputs)


def _op(operation: Operation) -> dist.ReduceOp.RedOpType:
    found: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, operation.reduction)
    return found


def _inputs(operation: Operation, size: int) -> list[Tensor]:
    return [values(operation, member, operation.count) for member in range(size)]


def _all_reduce(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    tensor = values(operation, me, operation.count)
    work = dist.all_reduce(tensor, _op(operation), group=group, async_op=True)
    return Open(operation, [work], [(tensor, _reduced(operation, _inputs(operation, size)))])


def _reduce(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    tensor = values(operation, me, operation.count)
    work = dist.reduce(
        tensor, op=_op(operation), group=group, async_op=True, group_dst=operation.root
    )
    expected = _reduced(operation, _inputs(operation, size))
    return Open(operation, [work], [(tensor, expected)] if me == operation.root else [])


def _broadcast(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    expected = values(operation, operation.root, operation.count)
    tensor = expected.clone() if me == operation.root else torch.zeros_like(expected)
    work = dist.broadcast(tensor, group=group, async_op=True, group_src=operation.root)
    return Open(operation, [work], [(tensor, expected)])


def _all_gather(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    inputs = _inputs(operation, size)
    taken = [torch.zeros_like(each) for each in inputs]
    work = dist.all_gather(taken, inputs[me], group=group, async_op=True)
    return Open(operation, [work], list(zip(taken, inputs, strict=True)))


def _gather(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    inputs = _inputs(operation, size)
    taken = [torch.zeros_like(each) for each in inputs] if me == operation.root else None
    work = dist.gather(inputs[me], taken, group=group, async_op=True, group_dst=operation.root)
    return Open(operation, [work], list(zip(taken or [], inputs if taken else [], strict=True)))


def _scatter(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    parts = [values(operation, operation.root, operation.count, part) for part in range(size)]
    taken = torch.zeros_like(parts[me])
    work = dist.scatter(
        taken,
        parts if me == operation.root else None,
        group=group,
        async_op=True,
        group_src=operation.root,
    )
    return Open(operation, [work], [(taken, parts[me])])


def _reduce_scatter(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    mine = [values(operation, me, operation.count, part) for part in range(size)]
    taken = torch.zeros_like(mine[me])
    work = dist.reduce_scatter_single(
        taken, torch.cat(mine), _op(operation), group=group, async_op=True
    )
    of_all = [values(operation, member, operation.count, me) for member in range(size)]
    return Open(operation, [work], [(taken, _reduced(operation, of_all))])


def _all_to_all(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    # To each other member another number of elements.
    def length(giver: int, taker: int) -> int:
        return operation.count // size + (giver + 2 * taker) % 5

    given = [values(operation, me, length(me, taker), taker) for taker in range(size)]
    expected = [values(operation, giver, length(giver, me), me) for giver in range(size)]
    taken = torch.zeros_like(torch.cat(expected))
    work = dist.all_to_all_single(
        taken,
        torch.cat(given),
        [len(each) for each in expected],
        [len(each) for each in given],
        group=group,
        async_op=True,
    )
    return Open(operation, [work], [(taken, torch.cat(expected))])


def _barrier(operation: Operation, group: dist.ProcessGroup, size: int, me: int) -> Open:
    return Open(operation, [dist.barrier(group, async_op=True)], [])


def _send(operation: Operation, group: dist.ProcessGroup, ranks: tuple[int, ...], me: int) -> Open:
    receiver = (operation.root + 1) % len(ranks)
    tensor = values(operation, operation.root, operation.count)
    if me == operation.root:
        work = dist.isend(tensor, group=group, tag=operation.number, group_dst=receiver)
        return Open(operation, [work], [])
    if me == receiver:
        taken = torch.zeros_like(tensor)
        work = dist.irecv(taken, group=group, tag=operation.number, group_src=operation.root)
        return Open(operation, [work], [(taken, tensor)])
    return Open(operation, [], [])


_CALLS: dict[str, Callable[[Operation, dist.ProcessGroup, int, int], Open]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Rank(RankSpec(**json.loads(Path(sys.argv[1]).read_text()))).run()
