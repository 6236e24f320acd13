"""A worker of the benchmarks between hosts: it alternates between a line and a Gloo group."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from hosts_line import WorkerSpec
from hosts_network import link_bytes
from paths import Way
from processor import processor_s
from protocol_worker import ProtocolWorker, block_sizes
from sides import TOLERANCES, exchange_step, mean_by_gloo


def work(spec: WorkerSpec) -> dict[str, list[dict[str, float]]]:
    """Exchanges the same numbers on both sides alternately; returns the cost of each exchange."""
    torch.set_num_threads(1)
    size = spec.workers(spec.hosts)
    dist.init_process_group("gloo", f"tcp://{spec.store}", rank=spec.rank, world_size=size)
    seen = _in_groups(spec) if spec.is_group else _on_a_line(spec)
    dist.destroy_process_group()
    return {side: runs[spec.warm_up :] for side, runs in seen.items()}


def _in_groups(spec: WorkerSpec) -> dict[str, list[dict[str, float]]]:
    """Sums in a process group of ours, and in one of Gloo."""
    ours = dist.new_group(backend="andon" if spec.path == "c10d" else spec.path)
    gradient = torch.randn(spec.mib * 2**18, generator=torch.Generator().manual_seed(spec.rank))
    tensors = {"ours": torch.empty_like(gradient), "gloo": torch.empty_like(gradient)}
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in tensors}
    for _ in range(spec.warm_up + spec.pairs):
        for side, group in (("ours", ours), ("gloo", None)):
            tensor = tensors[side].copy_(gradient)
            seen[side].append(_measured(partial(dist.all_reduce, tensor, group=group), 0))
    relative, absolute = TOLERANCES[spec.encoding]
    torch.testing.assert_close(tensors["ours"], tensors["gloo"], rtol=relative, atol=absolute)
    dist.barrier()  # nobody leaves during another rank's call
    for run in seen["ours"]:
        run["by_tcp"] = 1.0  # there is nothing else
    return seen


def _on_a_line(spec: WorkerSpec) -> dict[str, list[dict[str, float]]]:
    """Steps on a line, and sums in a group of Gloo."""
    sizes = block_sizes(spec.mib)
    gradient = np.random.default_rng(spec.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    tensor = torch.empty(gradient.size)
    seen: dict[str, list[dict[str, float]]] = {"ours": [], "gloo": []}
    certs = Path(spec.certs) if spec.certs else None
    with ProtocolWorker(
        spec.address, spec.run_id, spec.rank, spec.mib, spec.hosts, way=_way(spec), tls=certs
    ) as worker:
        for _ in range(spec.warm_up + spec.pairs):
            blocks = worker.laid(blocks)
            ours = _measured(lambda: exchange_step(worker, blocks), spec.service)  # noqa: B023
            seen["ours"].append(ours)
            if not spec.gloo:
                continue
            tensor.copy_(torch.from_numpy(gradient))
            seen["gloo"].append(_measured(lambda: mean_by_gloo(tensor), 0))
        if spec.gloo:
            relative, absolute = TOLERANCES[spec.encoding]
            means = np.concatenate(worker.averages)
            np.testing.assert_allclose(means, tensor.numpy(), rtol=relative, atol=absolute)
        lanes = worker.traffic.sent["tcp"]  # a ring's bytes are "ring", on a lane or not
        dist.barrier()  # nobody leaves the line during another worker's step
    for run in seen["ours"]:
        run["by_tcp"] = float(lanes > 0)
    return seen


def _way(spec: WorkerSpec) -> Way:
    # With one reducer, workers of other hosts would only log that they can't share memory with it.
    shares = spec.path == "reducers" or (spec.path != "ring" and spec.service > 0)
    shared_dir = Path(spec.shared_dir) if shares or spec.path == "shared-memory" else None
    return Way(shared_dir=shared_dir, tcp=spec.transport == "tcp", ring=spec.path == "ring")


def _measured(exchange: Callable[[], object], service: int) -> dict[str, float]:
    """What one exchange cost this host.

    Seconds, bytes over its link, processor seconds of this worker and the host's service, and the
    busy part of the machine's cores.
    """
    dist.barrier()
    sent, received = link_bytes()
    busy, idle = _processor_ticks()
    cpu_s, service_s = time.process_time(), _spent(service)
    began = time.perf_counter()
    exchange()
    seconds = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_s
    # By now a service has finished its work for all workers: the last commit ends it.
    dist.barrier()
    sent_then, received_then = link_bytes()
    busy_then, idle_then = _processor_ticks()
    ticks = busy_then - busy + idle_then - idle
    return {
        "seconds": seconds,
        "sent": sent_then - sent,
        "received": received_then - received,
        "cpu_s": cpu_s + _spent(service) - service_s,
        "busy": (busy_then - busy) / ticks if ticks else 0.0,
    }


def _spent(service: int) -> float:
    return (processor_s(service) or 0.0) if service else 0.0


def _processor_ticks() -> tuple[int, int]:
    """Busy and idle ticks of all the machine's cores since boot."""
    numbers = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, idle


if __name__ == "__main__":
    print(json.dumps(work(WorkerSpec(**json.loads(sys.argv[1])))))
