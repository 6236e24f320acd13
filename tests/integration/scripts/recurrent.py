"""A recurrent model that carries its hidden state from batch to batch, and drops it if reshaped.

Usage: recurrent.py SPEC.json OUT.json. In one step a worker kills itself in its loop body.
"""

from __future__ import annotations

import json
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


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(8 * spec["steps"], 5, 3), torch.randn(8 * spec["steps"], 5, 4))
    model: Any = nn.GRU(3, 4, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = Line(seed=1)
    model, optimizer, loader = line.prepare(model, optimizer, DataLoader(data, batch_size=8))
    state: torch.Tensor | None = None
    bodies = []
    for _ in line.epochs(1):
        for x, y in loader:
            if line.reshaped:
                state = None
            bodies.append((line.step + 1, len(x), state is not None))
            if spec["dies"] == [spec["slot"], line.step + 1]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            found, state = model(x, state)
            state = state.detach()
            line.backward(F.mse_loss(found, y))
            optimizer.step()
    Path(sys.argv[2]).write_text(json.dumps({"step": line.step, "bodies": bodies}))


if __name__ == "__main__":
    main()
