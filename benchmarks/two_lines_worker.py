"""A worker on two lines: it alternates steps between them."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from paths import PATHS
from processor import processor_s
from protocol_worker import ProtocolWorker, block_sizes
from sides import exchange_step
from two_lines import WARM_UP, Side, WorkerSpec


def work(spec: WorkerSpec) -> list[list[tuple[float, float]]]:
    """Exchanges the same numbers on both lines; returns wall and CPU seconds per step, by line."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.workers
    )
    sizes = block_sizes(spec.mib)
    gradient = np.random.default_rng(spec.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    taken: list[list[tuple[float, float]]] = [[], []]
    with ExitStack() as stack:
        first, second = (stack.enter_context(_worker(side, spec)) for side in spec.sides)
        for _ in range(WARM_UP + spec.pairs):
            for times, worker, side in zip(taken, (first, second), spec.sides, strict=True):
                dist.barrier()
                spent, began = _spent(side, spec), time.perf_counter()
                exchange_step(worker, blocks)
                seconds = time.perf_counter() - began
                times.append((seconds, _spent(side, spec) - spent))
        for ours, theirs in zip(first.averages, second.averages, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        dist.barrier()  # nobody leaves a line during another worker's step
    dist.destroy_process_group()
    return [times[WARM_UP:] for times in taken]


def _spent(side: Side, spec: WorkerSpec) -> float:
    """CPU seconds of this worker so far. Rank 0 adds those of the line's service."""
    service = processor_s(side.pid) if spec.rank == 0 else 0.0
    return (processor_s(os.getpid()) or 0.0) + (service or 0.0)


def _worker(side: Side, spec: WorkerSpec) -> ProtocolWorker:
    return ProtocolWorker(
        *(side.address, side.run_id, spec.rank, spec.mib, spec.workers),
        way=PATHS[side.path],
        tls=Path(side.certs) if side.certs else None,
        checked=side.checked,
    )


def _spec(told: dict[str, Any]) -> WorkerSpec:
    first, second = (Side(**side) for side in told.pop("sides"))
    return WorkerSpec(**told, sides=(first, second))


if __name__ == "__main__":
    print(json.dumps(work(_spec(json.loads(sys.argv[1])))))
