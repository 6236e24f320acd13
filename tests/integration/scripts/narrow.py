"""A loop whose gradients are known to the bit: the mean of its samples, whatever the weights are.

Usage: narrow.py SPEC.json OUT.json. In one step a worker makes a gradient that is not finite, once;
in another it dies in the middle of backward.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    samples = torch.tensor(spec["samples"], dtype=torch.float32)
    model = nn.Linear(samples.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=spec["rate"])
    loader: Any = DataLoader(TensorDataset(samples), spec["batch"])
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    spoilt = False

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal spoilt
        at = [spec["slot"], line.step + 1]
        if at == spec["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if at == spec["spoils"] and not spoilt:
            spoilt = True
            return gradient * torch.nan
        return gradient

    model.weight.register_hook(fail)
    for _ in line.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            line.backward(model(x).mean())
            optimizer.step()
    Path(sys.argv[2]).write_text(json.dumps({"weights": model.weight.flatten().tolist()}))


if __name__ == "__main__":
    main()
