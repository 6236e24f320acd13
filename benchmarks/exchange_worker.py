"""A worker of the exchange benchmark: on Andon's line and in a Gloo group, by turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from exchange import WARM_UP, Seat
from protocol_worker import ProtocolWorker, block_sizes

Floats = npt.NDArray[np.float32]


def work(seat: Seat) -> dict[str, list[float]]:
    """Exchanges the same numbers by turns, both from and to flat float32; seconds by side."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{seat.rendezvous}", rank=seat.rank, world_size=seat.workers
    )
    sizes = block_sizes(seat.mib)
    gradient = np.random.default_rng(seat.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    tensor = torch.empty(gradient.size)
    ours, gloo = [], []
    with ProtocolWorker(
        seat.address, seat.run_id, seat.rank, seat.mib, seat.workers, path=seat.path
    ) as worker:
        for _ in range(WARM_UP + seat.pairs):
            blocks = worker.laid(blocks)
            ours.append(_timed(partial(_step, worker, blocks)))
            tensor.copy_(torch.from_numpy(gradient))
            gloo.append(_timed(lambda: _all_reduce(tensor)))
        # Both did the same work, up to the order of the additions.
        means = np.concatenate(worker.averages)
        np.testing.assert_allclose(means, tensor.numpy(), rtol=1e-4, atol=1e-6)
        dist.barrier()  # nobody leaves the line in the midst of another's step
    dist.destroy_process_group()
    return {"ours_s": ours[WARM_UP:], "gloo_s": gloo[WARM_UP:]}


def _timed(exchange: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    exchange()
    return time.perf_counter() - began


def _step(worker: ProtocolWorker, blocks: Sequence[Floats]) -> None:
    if not worker.step(blocks):
        raise RuntimeError("the service ended in the midst of the benchmark: its log says why")


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    tensor.div_(dist.get_world_size())


if __name__ == "__main__":
    print(json.dumps(work(Seat(**json.loads(sys.argv[1])))))
