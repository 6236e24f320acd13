"""A worker of `small_steps.py`: it makes as many steps as it is told to, again and again."""

from __future__ import annotations

import json
import sys

import numpy as np
from paths import PATHS
from protocol_worker import ProtocolWorker, block_sizes
from sides import exchange_step


def main() -> None:
    """Joins; then makes the steps that each line of its input asks for, and prints a line."""
    spec = json.loads(sys.argv[1])
    sizes = block_sizes(spec["kib"] / 1024)
    gradient = np.random.default_rng(spec["rank"]).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    with ProtocolWorker(
        spec["address"],
        spec["run_id"],
        spec["rank"],
        spec["kib"] / 1024,
        spec["workers"],
        way=PATHS[spec["path"]],
    ) as worker:
        for line in sys.stdin:
            for _ in range(int(line)):
                blocks = worker.laid(blocks)
                exchange_step(worker, blocks)
            print(worker.steps, flush=True)


if __name__ == "__main__":
    main()
