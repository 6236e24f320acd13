"""The script of benchmarks/revival.py: a small model, and 20 ms of work in each step."""

from __future__ import annotations

import time

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

PACE_S = 0.02


def main() -> None:
    """Trains until the run is ended."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, DataLoader(data, batch_size=8))
    for _ in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(PACE_S)
            line.backward(mse_loss(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    main()
