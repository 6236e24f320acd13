"""A worker that is on two lines, and takes steps on them by turns."""

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
from processor import processor_s
from protocol_worker import ProtocolWorker, block_sizes
from sides import exchange_step
from two_lines import WARM_UP, Seat, Side


def work(seat: Seat) -> list[list[tuple[float, float]]]:
    """Exchanges the same numbers on both lines; by line, seconds and processor seconds a step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{seat.rendezvous}", rank=seat.rank, world_size=seat.workers
    )
    sizes = block_sizes(seat.mib)
    gradient = np.random.default_rng(seat.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    taken: list[list[tuple[float, float]]] = [[], []]
    with ExitStack() as stack:
        first, second = (stack.enter_context(_worker(side, seat)) for side in seat.sides)
        for _ in range(WARM_UP + seat.pairs):
            for times, worker, side in zip(taken, (first, second), seat.sides, strict=True):
                dist.barrier()
                spent, began = _spent(side, seat), time.perf_counter()
                exchange_step(worker, blocks)
                seconds = time.perf_counter() - began
                times.append((seconds, _spent(side, seat) - spent))
        for ours, theirs in zip(first.averages, second.averages, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        dist.barrier()  # nobody leaves a line in the midst of another's step
    dist.destroy_process_group()
    return [times[WARM_UP:] for times in taken]


def _spent(side: Side, seat: Seat) -> float:
    """Processor seconds of this worker so far; of one worker, of the line's service, too."""
    service = processor_s(side.pid) if seat.rank == 0 else 0.0
    return (processor_s(os.getpid()) or 0.0) + (service or 0.0)


def _worker(side: Side, seat: Seat) -> ProtocolWorker:
    return ProtocolWorker(
        *(side.address, side.run_id, seat.rank, seat.mib, seat.workers),
        path=side.path,
        tls=Path(side.certs) if side.certs else None,
        checked=side.checked,
    )


def _seat(told: dict[str, Any]) -> Seat:
    first, second = (Side(**side) for side in told.pop("sides"))
    return Seat(**told, sides=(first, second))


if __name__ == "__main__":
    print(json.dumps(work(_seat(json.loads(sys.argv[1])))))
