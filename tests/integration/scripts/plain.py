"""A user's training loop, configured by its spec; writes the epochs, steps and weights that it saw.

Usage: plain.py SPEC.json OUT.json. The environment decides how it runs: alone or on a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

SAMPLES, BATCH = 16, 4


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader: Any = DataLoader(data, BATCH)
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    evaluated = sum(len(inputs) for inputs, _ in line.split(DataLoader(data, BATCH)))
    seen: dict[str, Any] = {"epochs": [], "evaluated": line.mean(evaluated)}
    for epoch in range(spec["epochs"]) if spec.get("range") else line.epochs(spec["epochs"]):
        seen["epochs"].append(epoch)
        for number, (inputs, wanted) in enumerate(loader):
            if number == spec.get("break"):
                break
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(inputs), wanted))
            optimizer.step()
            if [spec["slot"], line.step] == spec.get("drift"):
                with torch.no_grad():
                    model.get_parameter("2.weight").add_(1e-3)
    if line.complete:
        with torch.no_grad():  # the loader is a plain one now, which trains nothing
            losses = [F.mse_loss(model(inputs), wanted).item() for inputs, wanted in loader]
        seen["final"] = [len(losses), line.mean(sum(losses) / len(losses))]
    seen["step"], seen["epoch"] = line.step, line.epoch
    seen["weights"] = [part.tolist() for part in model.parameters()]
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    for _run in range(json.loads(Path(sys.argv[1]).read_text()).get("runs", 1)):
        main()
