"""A worker of the benchmark between hosts: it alternates between an Andon line and a Gloo group."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from hosts import WARM_UP, WorkerSpec
from hosts_network import link_bytes
from protocol_worker import ProtocolWorker, block_sizes
from sides import exchange_step, mean_by_gloo

from andon.protocol.encoding import Encoding
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Policy
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.star import StarExchange
from andon_trainer.exchange.wire import ReducerAccess

Floats = npt.NDArray[np.float32]

_OPENING_S = 60.0
_TOLERANCE = {"float32": (1e-4, 1e-6), "bfloat16": (2e-2, 2e-2)}
"""Relative and absolute tolerance of our result against Gloo's float32."""


class HostWorker(ProtocolWorker):
    """A protocol worker that exchanges with the reducers of each round's map."""

    encoding = Encoding.FLOAT32
    shared_dir: Path | None = None
    _reducers: tuple[ReducerShare, ...] = ()

    def _contribute(self, assigned: Assigned, gradients: Sequence[Floats]) -> None:
        reducers = assigned.reducers
        if reducers != self._reducers and any(share.address for share in reducers):
            self._exchange.close()
            policy = Policy(encoding=self.encoding)
            self._exchange = StarExchange(
                self.layout,
                policy,
                self._inbox,
                reducers,
                ReducerAccess(opening_s=_OPENING_S, shared_dir=self.shared_dir),
            )
        self._reducers = reducers
        super()._contribute(assigned, gradients)


def work(spec: WorkerSpec) -> dict[str, list[dict[str, float]]]:
    """Exchanges the same numbers on both sides alternately; returns the cost of each exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{spec.store}", rank=spec.rank, world_size=spec.hosts)
    sizes = block_sizes(spec.mib)
    gradient = np.random.default_rng(spec.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    tensor = torch.empty(gradient.size)
    seen: dict[str, list[dict[str, float]]] = {"ours": [], "gloo": []}
    worker = HostWorker(spec.address, spec.run_id, spec.rank, spec.mib, spec.hosts)
    worker.encoding, worker.shared_dir = Encoding[spec.encoding.upper()], Path(spec.shared_dir)
    with worker:
        for _ in range(WARM_UP + spec.pairs):
            seen["ours"].append(_measured(lambda: exchange_step(worker, blocks)))
            tensor.copy_(torch.from_numpy(gradient))
            seen["gloo"].append(_measured(lambda: mean_by_gloo(tensor)))
        relative, absolute = _TOLERANCE[spec.encoding]
        means = np.concatenate(worker.averages)
        np.testing.assert_allclose(means, tensor.numpy(), rtol=relative, atol=absolute)
        dist.barrier()  # nobody leaves the line during another worker's step
    dist.destroy_process_group()
    return {side: runs[WARM_UP:] for side, runs in seen.items()}


def _measured(exchange: Callable[[], None]) -> dict[str, float]:
    dist.barrier()
    sent, received = link_bytes()
    busy, idle = _processor_ticks()
    began = time.perf_counter()
    exchange()
    seconds = time.perf_counter() - began
    dist.barrier()
    sent_then, received_then = link_bytes()
    busy_then, idle_then = _processor_ticks()
    ticks = busy_then - busy + idle_then - idle
    return {
        "seconds": seconds,
        "sent": sent_then - sent,
        "received": received_then - received,
        "busy": (busy_then - busy) / ticks if ticks else 0.0,
    }


def _processor_ticks() -> tuple[int, int]:
    """Busy and idle ticks of all the machine's cores since boot."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, idle


if __name__ == "__main__":
    print(json.dumps(work(WorkerSpec(**json.loads(sys.argv[1])))))
