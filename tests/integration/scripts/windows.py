"""A worker for tests of learning on local steps, with a digest of the weights after each epoch.

Usage: windows.py SPEC.json OUT.json. In `slow` slots each local step takes `pace_s`, as often as
the slot is there. Whoever came late stops the run some windows after it is on a roster.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

WIDTH = 6


class Net(nn.Module):
    """A layer with running statistics, and two blocks beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.stack(self.norm(x)))
        return out


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(720, WIDTH)
    line = Line(total_steps=spec["steps"])
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), 12, shuffle=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    states: dict[str, str] = {}
    seen: dict[str, Any] = {"states": states, "places": [], "made_up": 0}
    came_at = None
    for _ in line.epochs(10**6):
        for batch, target in loader:
            time.sleep(spec["pace_s"] * spec["slow"].count(spec["slot"]))
            place = [line.step + 1, line.rank, line.world_size]
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(batch), target))
            optimizer.step()
            if not line.committed:
                continue
            seen["places"].append(place)
            # A commit without it, in a loop body of its own samples: two are borrowed.
            seen["made_up"] += not line.local_steps and len(batch) > 2
            if place[0] > 2 and place[1] == place[2]:
                Path(sys.argv[2]).with_suffix(".attends").touch()
            elif seen["places"][0][1] == seen["places"][0][2]:
                came_at = place[0] if came_at is None else came_at
                if line.step >= came_at + spec["stay"]:
                    line.stop("the newcomer has seen enough")
        with torch.no_grad():
            line.mean(0.0)
        # Between two epochs the models hold the line's weights, on every schedule.
        parts = [part.numpy().tobytes() for part in model.state_dict().values()]
        states[str(line.step)] = hashlib.sha256(b"".join(parts)).hexdigest()
    Path(sys.argv[2]).write_text(json.dumps({**seen, "step": line.step}))


if __name__ == "__main__":
    main()
