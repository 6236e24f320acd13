"""A worker for the board's tests: trains a small network at a chosen pace, and logs what it likes.

Usage: paced.py SPEC.json OUT.json. The spec says how long the slot's machine takes for a step, what
its host is called, and at which step one of its gradients is NaN.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line


def samples() -> TensorDataset:
    """Points of ten classes that overlap a little, the same for every worker."""
    chance = torch.Generator().manual_seed(3)
    centres = torch.randn(10, 8, generator=chance)
    labels = torch.randint(0, 10, (4096,), generator=chance)
    return TensorDataset(centres[labels] + 0.6 * torch.randn(4096, 8, generator=chance), labels)


def plant(line: Line, model: nn.Module, spec: dict[str, Any]) -> None:
    """Makes one element of one gradient NaN, once, at the step and slot of the spec."""
    wanted = spec.get("poison")
    if not wanted or wanted["slot"] != spec["slot"]:
        return

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        if line.step + 1 == wanted["step"] and not wanted.get("done"):
            wanted["done"] = True
            gradient = gradient.clone()
            gradient[3, 2] = math.nan
        return gradient

    parameter = dict(model.named_parameters())["hidden.weight"]
    parameter.register_hook(poisoned)  # type: ignore[no-untyped-call]  # torch's own signature


class Network(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]  # untyped call


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    slot = spec["slot"]
    if "hosts" in spec:  # as a host of that name would report itself
        socket.gethostname = lambda: str(spec["hosts"][slot])
    torch.set_num_threads(1)
    torch.manual_seed(spec.get("seed", 1))
    model = Network()
    line = Line(total_steps=spec["steps"])
    optimizer = torch.optim.Adam(model.parameters(), lr=spec.get("lr", 0.01))
    data = samples()
    loader = DataLoader(data, spec["batch"], shuffle=True)
    steps = spec["steps"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / 40) * (1 + math.cos(math.pi * min(1, step / steps))) / 2,
    )
    model, optimizer, loader, scheduler = line.prepare(model, optimizer, loader, scheduler)
    plant(line, model, spec)
    held_out = data[:256]
    for _epoch in line.epochs(10**6):
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(spec["paces_s"][slot])  # what a larger model would compute here
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            if line.is_main and line.step % 10 == 0:
                with torch.no_grad():
                    scores = model(held_out[0])
                loss = F.cross_entropy(scores, held_out[1])
                right = (scores.argmax(1) == held_out[1]).float().mean()
                line.log(
                    {"val_loss": loss, "val_accuracy": right, "lr": scheduler.get_last_lr()[0]}
                )
    Path(sys.argv[2]).write_text(json.dumps({"step": line.step}))


if __name__ == "__main__":
    main()
