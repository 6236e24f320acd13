"""The script of benchmarks/joining.py: one layer under AdamW, and a pause for each sample."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.capabilities import LEARNING
from andon_trainer import Line
from andon_trainer.line import joining

BATCH = int(os.environ["JOINING_BATCH"])
PACE_S = float(os.environ["JOINING_PACE_S"])
"""Of a sample: time in which the processors are free, as with a GPU."""
WIDTH = int(os.environ["JOINING_WIDTH"])


def main() -> None:
    """Trains until the run is ended."""
    if os.environ.get("JOINING_TRANSFER"):
        # As workers of an earlier version, which get the state while the others wait.
        able = tuple(each for each in joining._CAPABILITIES if each != LEARNING)
        vars(joining)["_CAPABILITIES"] = able
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randn(4096, 1))
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    begun = False
    for _ in line.epochs(10**6):
        for x, y in loader:
            if not begun:
                # Now it has the line's state.
                Path(f"begun-{os.getpid()}").write_text(str(time.time()))
                begun = True
            optimizer.zero_grad()
            time.sleep(PACE_S * len(x))
            line.backward(mse_loss(model(x).mean(1, keepdim=True), y))
            optimizer.step()


if __name__ == "__main__":
    main()
