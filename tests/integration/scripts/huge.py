"""A worker whose model is as large as the spec says: one matrix, and one small vector after it.

Usage: huge.py SPEC.json OUT.json. The expected weights need no second model, because all rows of
the matrix have the same gradient.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from andon_trainer import Line

COLUMNS = 2**20
LR = 0.5


class Large(nn.Module):
    """`rows` rows of a million columns, all 0."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(rows, COLUMNS))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, pattern: torch.Tensor) -> torch.Tensor:
        """A loss whose gradient is `pattern` in each row, and 1 in the bias."""
        loss: torch.Tensor = (self.matrix @ pattern).sum() + self.bias.sum()
        return loss


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    line = Line(total_steps=spec["steps"])
    model = Large(spec["rows"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = line.prepare(model, optimizer)
    pattern = (torch.arange(COLUMNS) % 251 - 125) / 8.0
    for _epoch in line.epochs(spec["steps"]):
        for _shard in line.shards(samples=4, batch_size=4):
            optimizer.zero_grad()
            line.backward(model(pattern))
            optimizer.step()
    expected = -LR * spec["steps"] * pattern
    wrong = sum(int((row != expected).sum()) for row in model.matrix.detach())
    seen = {
        "step": line.step,
        "elements": model.matrix.numel(),
        "wrong": wrong,
        "bias": model.bias.detach().tolist(),
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
