"""A client for the judge: a small training script with a `Line`.

Usage: judged_line.py [DEFECT], which is one of `grain_defects.GRAIN_DEFECTS`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line
from conformance.grain_defects import GRAIN_DEFECTS

__all__ = ["main"]


def main() -> None:
    """Trains until the run is over."""
    if sys.argv[1:]:
        GRAIN_DEFECTS[sys.argv[1]].build()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
    line = Line()
    # Eight grains, the last one short: enough for a node whose order of additions shows.
    batch, micro_batch = (15, 2) if line.same_bits else (8, None)
    model, optimizer, loader = line.prepare(
        *(model, optimizer, DataLoader(samples, batch, shuffle=True)),
        micro_batch_size=micro_batch,
    )
    for _epoch in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    main()
