"""A worker of `same_bits.py`: trains, and takes the time of each block of steps when it is told to.

    python benchmarks/same_bits_worker.py '{"same_bits": true, "width": 256, ...}'

It begins a block for each line that it reads, and prints what the block took as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, LETTERS, Letters
from torch import nn
from torch.utils.data import DataLoader

from andon_trainer import Line

__all__: list[str] = []


def main() -> None:
    """Trains until its input ends."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    shared = spec["shared_dir"]
    line = Line(
        address=spec["address"],
        run_id=spec["run_id"],
        same_bits=spec["same_bits"],
        shared_dir=Path(shared) if shared else "off",
        metrics_bind="off",
        check_data=False,
    )
    model: Any = GPT(layers=spec["layers"], width=spec["width"], context=spec["context"])
    if spec["processes"] > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=False)
    data = Letters(10**6, spec["context"])
    loader: Any = DataLoader(data, spec["batch"], shuffle=True)
    model, optimizer, loader = line.prepare(
        model, optimizer, loader, micro_batch_size=spec["micro"]
    )
    begun, took_from = -1, (0.0, 0.0)
    for _ in line.epochs(10**6):
        for x, y in loader:
            if line.step % spec["block"] == 0 and line.step != begun:
                now = time.perf_counter(), time.process_time()
                if begun >= 0:
                    took = {
                        "wall_s": now[0] - took_from[0],
                        "processor_s": now[1] - took_from[1],
                        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                    }
                    print(json.dumps(took), flush=True)
                begun = line.step
                if not sys.stdin.readline():
                    line.stop("measured")
                took_from = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x).view(-1, LETTERS), y.view(-1)))
            optimizer.step()
    line.close()


if __name__ == "__main__":
    main()
