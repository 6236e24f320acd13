"""A worker for tests: one tensor far larger than a message, and a few steps of SGD on it.

Usage: large.py SPEC.json OUT.json. The gradient at position p is p + 1 everywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from andon_trainer import Line
from andon_trainer.state.weights import weights_digest


class Table(nn.Module):
    """One parameter."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * (indices + 1.0).mean()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    line = Line(total_steps=spec["steps"])
    model = Table(spec["elements"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = line.prepare(model, optimizer)
    for _epoch in line.epochs(spec["steps"]):
        for shard in line.shards(spec["batch"], batch_size=spec["batch"]):
            optimizer.zero_grad()
            line.backward(model(shard.indices))
            optimizer.step()
    seen = {
        "step": line.step,
        "digest": weights_digest([model]).hex(),
        "ends": [model.weight[0].item(), model.weight[-1].item()],
    }
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
