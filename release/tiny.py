"""The run that `make dist` tries a release with: twenty steps of a line through points."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

torch.manual_seed(0)
x = torch.linspace(-1, 1, 64).reshape(-1, 1)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8, shuffle=True)

line = Line(total_steps=20)
model, optimizer, loader = line.prepare(model, optimizer, loader)
for _epoch in line.epochs(10):
    for points, values in loader:
        optimizer.zero_grad()
        line.backward(nn.functional.mse_loss(model(points), values))
        optimizer.step()
