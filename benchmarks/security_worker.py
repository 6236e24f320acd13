"""A worker of the benchmark of encryption: on a line in the clear and one over mTLS, by turns."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from protocol_worker import ProtocolWorker, block_sizes
from security import WARM_UP, Seat
from sides import exchange_step


def work(seat: Seat) -> dict[str, list[float]]:
    """Exchanges the same numbers on both lines; seconds by line."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{seat.rendezvous}", rank=seat.rank, world_size=seat.workers
    )
    sizes = block_sizes(seat.mib)
    gradient = np.random.default_rng(seat.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    about = (seat.rank, seat.mib, seat.workers)
    seconds: dict[str, list[float]] = {"clear_s": [], "mtls_s": []}
    with (
        ProtocolWorker(*seat.clear, *about) as clear,
        ProtocolWorker(*seat.mtls, *about, tls=Path(seat.certs)) as mtls,
    ):
        for _ in range(WARM_UP + seat.pairs):
            for side, worker in (("clear_s", clear), ("mtls_s", mtls)):
                dist.barrier()
                began = time.perf_counter()
                exchange_step(worker, blocks)
                seconds[side].append(time.perf_counter() - began)
        for ours, theirs in zip(clear.averages, mtls.averages, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        dist.barrier()  # nobody leaves a line in the midst of another's step
    dist.destroy_process_group()
    return {side: times[WARM_UP:] for side, times in seconds.items()}


if __name__ == "__main__":
    print(json.dumps(work(Seat(**json.loads(sys.argv[1])))))
