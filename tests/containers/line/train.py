"""Teaches a small model, at an unhurried pace, for as long as it is told to.

A file called `bad` in the run's folder makes the samples of every worker NaN while it is there.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

PACE_S = 0.05
"""Leaves the processors of a small machine to the other containers."""

line = Line(seed=1, total_steps=int(os.environ.get("ANDON_STEPS") or 100_000))
torch.manual_seed(1)
x = torch.randn(4096, 64)
y = (x @ torch.randn(64, 8)).argmax(-1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, loader = line.prepare(model, optimizer, loader)
assert line.run_dir is not None
bad = line.run_dir / "bad"

for _ in line.epochs(10_000):
    for features, labels in loader:
        time.sleep(PACE_S)
        if bad.exists():
            features = features * torch.nan
        optimizer.zero_grad()
        line.backward(nn.functional.cross_entropy(model(features), labels))
        optimizer.step()
