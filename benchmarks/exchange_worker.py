"""A worker of the exchange benchmark: it alternates between an Andon line and a Gloo group."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from exchange import WARM_UP, WorkerSpec
from paths import PATHS
from processor import processor_s
from protocol_worker import ProtocolWorker, block_sizes
from sides import TOLERANCES, exchange_step, mean_by_gloo


@dataclass(slots=True)
class Side:
    """Times of one side's exchanges; `service_cpu_s` is empty if the system does not report it."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    service_cpu_s: list[float] = field(default_factory=list)

    def time(self, exchange: Callable[[], None], service_pid: int | None) -> None:
        """Times one exchange, which all workers start together."""
        # Before the barrier: it takes a while, and the others would wait for this worker.
        service = None if service_pid is None else processor_s(service_pid)
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        exchange()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)
        # By now the service has finished its work for all workers: the last commit ends it.
        dist.barrier()
        after = None if service_pid is None else processor_s(service_pid)
        if service is not None and after is not None:
            self.service_cpu_s.append(after - service)


def work(spec: WorkerSpec) -> dict[str, list[float]]:
    """Exchanges the same numbers on both sides alternately; returns the seconds by side.

    Both start from, and end with, one flat float32 vector.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{spec.rendezvous}", rank=spec.rank, world_size=spec.workers
    )
    sizes = block_sizes(spec.mib)
    gradient = np.random.default_rng(spec.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    tensor, copy = torch.empty(gradient.size), np.empty_like(gradient)
    ours, gloo, memory = Side(), Side(), Side()
    # An exchange reads all contributions and writes one mean: in total, as many bytes as this copy.
    share = gradient.size * (spec.workers + 1) // (2 * spec.workers)
    with ProtocolWorker(
        spec.address, spec.run_id, spec.rank, spec.mib, spec.workers, way=PATHS[spec.path]
    ) as worker:
        for _ in range(WARM_UP + spec.pairs):
            blocks = worker.laid(blocks)
            ours.time(
                partial(exchange_step, worker, blocks), None if spec.rank else spec.service_pid
            )
            tensor.copy_(torch.from_numpy(gradient))
            gloo.time(lambda: mean_by_gloo(tensor), None)
            memory.time(lambda: np.copyto(copy[:share], gradient[:share]), None)
        # Both sides must agree, up to the order of the additions and the encoding.
        means, (relative, absolute) = np.concatenate(worker.averages), TOLERANCES[spec.encoding]
        np.testing.assert_allclose(means, tensor.numpy(), rtol=relative, atol=absolute)
        dist.barrier()  # nobody leaves the line during another worker's step
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
    print(json.dumps(work(WorkerSpec(**json.loads(sys.argv[1])))))
