"""A client for the judge: a small training script with a `Line`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

__all__ = ["main"]


def main() -> None:
    """Trains until the run is over."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, DataLoader(samples, 8, shuffle=True))
    for _epoch in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    main()
