"""A rank of the benchmark of calls: it makes each of them in a group of ours and in one of Gloo."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from c10d_calls import WARM_UP, RankSpec
from torch import Tensor


@dataclass(slots=True)
class Side:
    """A group, its tensors, and the times of its calls."""

    call: Callable[[], object]
    source: Tensor
    given: Tensor
    """What the call may overwrite."""
    taken: Tensor
    """What it brings; for all_reduce the same."""
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def time(self, at_once: int) -> None:
        """Times some calls, which all ranks start together."""
        self.given.copy_(self.source)
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        for number in range(at_once):
            if number:
                self.given.copy_(self.source)  # else the sums would soon be infinite
            self.call()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)


def side_of(spec: RankSpec, group: dist.ProcessGroup) -> Side:
    """One of both sides, with tensors of its own."""
    elements = spec.kib * 256
    whole, part = elements, elements // spec.ranks
    generator = torch.Generator().manual_seed(spec.rank)
    source = torch.randn(part if spec.call == "all_gather" else whole, generator=generator)
    given = torch.empty_like(source)
    taken = {
        "all_reduce": given,
        "all_gather": torch.empty(part * spec.ranks),
        "reduce_scatter": torch.empty(part),
        "all_to_all": torch.empty(whole),
    }[spec.call]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(given, group=group),
        "all_gather": lambda: dist.all_gather_single(taken, given, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(taken, given, group=group),
        "all_to_all": lambda: dist.all_to_all_single(taken, given, group=group),
    }
    return Side(calls[spec.call], source, given, taken)


def work(spec: RankSpec) -> dict[str, list[float]]:
    """Makes the call on both sides in turns; returns the seconds by side.

    Raises:
        AssertionError: the sides' results differ by more than the order of the additions.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.ranks
    )
    theirs = side_of(spec, dist.new_group(backend="gloo"))
    ours = side_of(spec, dist.new_group(backend=spec.backend))
    for _ in range(WARM_UP + spec.pairs):
        ours.time(spec.at_once)
        theirs.time(spec.at_once)
    # Two ranks' sums have one order.
    tolerance = 0.0 if spec.ranks == 2 else 1e-5
    torch.testing.assert_close(ours.taken, theirs.taken, rtol=tolerance, atol=tolerance)
    dist.barrier()  # nobody leaves during another rank's call
    dist.destroy_process_group()
    return {
        "ours_s": ours.seconds[WARM_UP:],
        "gloo_s": theirs.seconds[WARM_UP:],
        "ours_cpu_s": ours.cpu_s[WARM_UP:],
        "gloo_cpu_s": theirs.cpu_s[WARM_UP:],
    }


if __name__ == "__main__":
    print(json.dumps(work(RankSpec(**json.loads(sys.argv[1])))))
