"""A training script that both versions run: it uses only what the earlier one has, too.

Usage: train.py SPEC.json OUT. It writes the final weights to OUT.safetensors, and the steps that it
took part in, with their losses, to OUT.json. The environment decides how it runs: alone or on a
line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from andon_trainer import Line

FEATURES, HIDDEN = 6, 16


class Squares(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points, and what is to be learned of them."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(size, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index], self._x[index].square().sum().reshape(1)


class Model(nn.Module):
    """Two layers; with a frozen one before them, or running statistics between, if asked for."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, FEATURES)
        self.before.requires_grad_(not spec.get("frozen", False))
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if spec.get("batchnorm") else nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.gelu(self.up(self.before(x))))
        return self.down(hidden)  # type: ignore[no-any-return]  # untyped call


def main() -> None:
    spec, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: nn.Module = Model(spec)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader: Any = DataLoader(Squares(spec["samples"]), spec["batch"], shuffle=True)
    line = Line(total_steps=spec["steps"])
    model, optimizer, loader, scheduler = line.prepare(model, optimizer, loader, scheduler)
    seen: list[Any] = []
    for _epoch in line.epochs(10**6):
        for x, y in loader:
            if line.step + 1 == spec.get("hold_at"):
                out.with_suffix(".holds").touch()
                while not Path(spec["until"]).exists():
                    time.sleep(0.01)
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            if line.committed:
                seen.append([line.step, line.loss])
                time.sleep(spec.get("pause_s", 0.0))
    mean = line.mean(float(line.rank + 1))
    save_file(dict(model.state_dict()), out.with_suffix(".safetensors"))
    out.with_suffix(".json").write_text(json.dumps({"seen": seen, "mean": mean}))


if __name__ == "__main__":
    main()
