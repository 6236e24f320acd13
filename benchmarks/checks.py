"""What do a worker's checks of whole models cost: the digest of the weights and the gradient norm?

One thread computes both alternately over the same number of float32 bytes, as a worker does. The
thread's CPU time is what an idle machine would need; the wall time is what this machine needed. A
worker computes the digest over its parameters every `digest_every` steps. It computes the norm over
the averaged blocks in each step, if the line requests it.

    python benchmarks/checks.py --json benchmarks/results/checks.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe_machine
from torch import nn

from andon_trainer.averaging.norms import l2_norm
from andon_trainer.state.replica import Replica

BLOCKS = 25


def measure(megabytes: int, repeats: int) -> dict[str, object]:
    """Medians and ranges of both, in milliseconds."""
    width = megabytes * 1_000_000 // 4 // BLOCKS // 1000
    model = nn.ParameterList(nn.Parameter(torch.randn(1000, width)) for _ in range(BLOCKS))
    blocks = [part.detach().flatten().numpy() for part in model.parameters()]
    elements = sum(block.size for block in blocks)
    replica = Replica([model])
    acts: dict[str, Callable[[], object]] = {
        "digest": replica.digest,
        "gradient_norm": lambda: l2_norm(blocks),
    }
    cpu: dict[str, list[float]] = {name: [] for name in acts}
    wall: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(repeats + 1):
        for name, act in acts.items():
            began, cpu_began = time.perf_counter(), time.thread_time()
            act()
            if turn:  # the first run pays for page faults
                cpu[name].append((time.thread_time() - cpu_began) * 1e3)
                wall[name].append((time.perf_counter() - began) * 1e3)
    return {
        "megabytes": round(elements * 4 / 1e6, 1),
        "repeats": repeats,
        **{f"{name}_cpu_ms": _summary(found) for name, found in cpu.items()},
        **{f"{name}_wall_ms": _summary(found) for name, found in wall.items()},
    }


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 1),
        "least": round(min(times), 1),
        "greatest": round(max(times), 1),
    }


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100, help="of 10^6 bytes, float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"machine": describe_machine(), **measure(options.megabytes, options.repeats)}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
