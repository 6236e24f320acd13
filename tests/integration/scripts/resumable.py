"""A script for tests of resuming: a small regression with AdamW, and all that a checkpoint holds.

Usage: resumable.py FOLDER STEPS [--hold-at STEP] [--fail-at STEP] [--slot N]. Each worker leaves
its final weights and what it saw in FOLDER/out-RANK.*. In slot N (default 0; -1: in all) it can
hold once in the middle of a step until it is killed, or raise at each attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

SAMPLES, BATCH = 52, 12


class Average:
    """A moving average of the loss: an example of the script's own state."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    for flag in ("--hold-at", "--fail-at", "--slot"):
        parser.add_argument(flag, type=int, default=0)
    options = parser.parse_args()
    mine = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(1)

    line = Line(total_steps=options.steps)
    average = Average()
    line.register("average", average)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    model, optimizer, scheduler, loader = line.prepare(model, optimizer, scheduler, loader)
    began = line.step
    losses = []

    for _epoch in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            at = line.step + 1 if options.slot in (mine, -1) else 0
            if at and at == options.fail_at:
                raise RuntimeError("this script fails, as requested")
            held = options.folder / f"held-at-{at}"
            if at and at == options.hold_at and not held.exists():
                held.touch()  # once: a restarted worker continues
                sys.stdout.write(f"holding at step {at}\n")
                sys.stdout.flush()
                while True:
                    time.sleep(1)
            line.backward(loss)
            optimizer.step()
            scheduler.step()
            if line.committed:
                losses.append(line.loss)
                average.add(line.loss or 0.0)

    seen = {"began": began, "step": line.step, "losses": losses, "average": average.value}
    save_file(dict(model.state_dict()), options.folder / f"out-{mine}.safetensors")
    (options.folder / f"out-{mine}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
