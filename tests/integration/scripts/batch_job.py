"""A script for tests of SLURM: says who it is and where it began; slow until the job is requeued.

Usage: batch_job.py STEPS.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line
from andon_trainer.config import LineConfig

SLOW_STEP_S = 0.1


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(24, 3)
    first_life = "SLURM_RESTART_COUNT" not in os.environ

    line = Line(total_steps=int(sys.argv[1]))
    model: Any = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    place = LineConfig.read()
    say(f"slot {place.launch_slot}, number {place.local_rank} here, began at step {line.step}")
    for _ in line.epochs(10**6):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(inputs), wanted))
            optimizer.step()
            if first_life:
                say(f"at step {line.step}")
                time.sleep(SLOW_STEP_S)
    say(f"worker {line.rank} ended at step {line.step}")


if __name__ == "__main__":
    main()
