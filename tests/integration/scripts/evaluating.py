"""Evaluates after each epoch; slot 1 kills itself in the middle of its first evaluation.

Usage: evaluating.py SPEC.json OUT.json. Writes whether each evaluation covered every sample, the
samples of the last one, and what it said was missing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

SAMPLES, BATCH = 23, 8


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    line = Line()
    loader: Any = DataLoader(data, BATCH)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    evaluation = DataLoader(data, 2, num_workers=1, persistent_workers=True)
    seen: dict[str, Any] = {"covered": [], "rows": []}

    def evaluate() -> dict[str, float]:
        total = 0.0
        rows: list[int] = []
        with torch.no_grad():
            for inputs, wanted, numbers in line.split(evaluation):
                if spec["slot"] == 1 and rows:
                    os.kill(os.getpid(), signal.SIGKILL)
                total += F.mse_loss(model(inputs), wanted, reduction="sum").item()
                rows += numbers.tolist()
        loss = line.mean({"loss": total / max(len(rows), 1)}, weight=len(rows))
        seen["covered"].append(line.covered)
        seen["rows"] = line.gather(torch.tensor(rows)).tolist()
        return loss

    for _epoch in line.epochs(2):
        for inputs, wanted, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(inputs), wanted))
            optimizer.step()
        found = evaluate()
        while not line.covered:
            found = evaluate()
        with torch.no_grad():
            whole = F.mse_loss(model(x), data.tensors[1]).item()
        seen["error"] = abs(found["loss"] - whole)
    seen["step"] = line.step
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
