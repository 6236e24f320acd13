"""A worker of the benchmark of preemptions: its computing is a wait for each sample."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

_SAMPLES = 200_000


def work(spec: dict[str, Any]) -> None:
    """Trains until the line ends; each computed sample is a byte in a file.

    While a newcomer learns, its loop goes over borrowed samples, which count for nothing: they are
    no work of the line that is done again.
    """
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model: Any = nn.Linear(16, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.ones(_SAMPLES, 16), torch.zeros(_SAMPLES, dtype=torch.long))
    counted = os.open(spec["counted"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    if not sys.stdin.readline():
        return  # Its machine never came.
    line = Line(address=spec["address"], run_id=spec["run_id"])
    model, optimizer, loader = line.prepare(
        model, optimizer, DataLoader(data, batch_size=spec["batch"])
    )
    for _ in line.epochs(1):
        for x, y in loader:
            began = time.monotonic()
            for number in range(1, len(x) + 1):
                time.sleep(max(0.0, began + number * spec["sample_s"] - time.monotonic()))
                if line.rank < line.world_size:  # A learner is on no roster.
                    os.write(counted, b".")
            loss = nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            line.backward(loss)
            optimizer.step()
    line.close()


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
