"""A worker of the exchange benchmark: on Andon's line and in a Gloo group, by turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from exchange import WARM_UP, Seat
from processor import processor_s
from protocol_worker import ProtocolWorker, block_sizes
from sides import exchange_step, mean_by_gloo

Floats = npt.NDArray[np.float32]

_TOLERANCES = {"float32": (1e-4, 1e-6), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 3e-2)}
"""Of the means, relative and absolute: a few units of the last place of what was sent."""


@dataclass(slots=True)
class Side:
    """What the exchanges of one side took; `service_cpu_s` stays empty where nobody tells."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    service_cpu_s: list[float] = field(default_factory=list)

    def time(self, exchange: Callable[[], None], service_pid: int | None) -> None:
        """Runs an exchange, which all workers begin together."""
        dist.barrier()
        service = None if service_pid is None else processor_s(service_pid)
        cpu, began = time.process_time(), time.perf_counter()
        exchange()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)
        # The service's part of all workers: none is done later than the last one's commit.
        dist.barrier()
        after = None if service_pid is None else processor_s(service_pid)
        if service is not None and after is not None:
            self.service_cpu_s.append(after - service)


def work(seat: Seat) -> dict[str, list[float]]:
    """Exchanges the same numbers by turns, both from and to flat float32; seconds by side."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{seat.rendezvous}", rank=seat.rank, world_size=seat.workers
    )
    sizes = block_sizes(seat.mib)
    gradient = np.random.default_rng(seat.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    tensor, copy = torch.empty(gradient.size), np.empty_like(gradient)
    ours, gloo, memory = Side(), Side(), Side()
    # All contributions are read and one mean is written: as many bytes as this copies, all told.
    share = gradient.size * (seat.workers + 1) // (2 * seat.workers)
    with ProtocolWorker(
        seat.address, seat.run_id, seat.rank, seat.mib, seat.workers, path=seat.path
    ) as worker:
        for _ in range(WARM_UP + seat.pairs):
            blocks = worker.laid(blocks)
            ours.time(
                partial(exchange_step, worker, blocks), None if seat.rank else seat.service_pid
            )
            tensor.copy_(torch.from_numpy(gradient))
            gloo.time(lambda: mean_by_gloo(tensor), None)
            memory.time(lambda: np.copyto(copy[:share], gradient[:share]), None)
        # Both did the same work, up to the order of the additions and the encoding.
        means, (relative, absolute) = np.concatenate(worker.averages), _TOLERANCES[seat.encoding]
        np.testing.assert_allclose(means, tensor.numpy(), rtol=relative, atol=absolute)
        dist.barrier()  # nobody leaves the line in the midst of another's step
    dist.destroy_process_group()
    return {
        "ours_s": ours.seconds[WARM_UP:],
        "gloo_s": gloo.seconds[WARM_UP:],
        "memory_s": memory.seconds[WARM_UP:],
        "ours_cpu_s": ours.cpu_s[WARM_UP:],
        "gloo_cpu_s": gloo.cpu_s[WARM_UP:],
        "service_cpu_s": ours.service_cpu_s[WARM_UP:],
    }


if __name__ == "__main__":
    print(json.dumps(work(Seat(**json.loads(sys.argv[1])))))
