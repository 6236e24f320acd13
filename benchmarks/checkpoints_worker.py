"""A worker of the benchmark of checkpoints: trains, and times each step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoints import Trial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

_LAYERS = 8
_SAMPLES = 4096


def work(trial: Trial, run_dir: Path) -> None:
    """Trains, and prints how long each step took and whether a checkpoint was written meanwhile."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [(nn.Linear(trial.width, trial.width), nn.ReLU()) for _ in range(_LAYERS)]
    model: nn.Module = nn.Sequential(*(part for pair in layers for part in pair))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(_SAMPLES, trial.width)
    loader = DataLoader(TensorDataset(x), trial.batch, shuffle=True)
    line = Line(
        device="cpu",
        total_steps=trial.steps,
        checkpoint_every=trial.every,
        keep_checkpoints=1,
        run_dir=run_dir,
    )
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    steps = []
    written: set[str] = set()
    began, before = time.perf_counter(), _seen(run_dir)
    for _epoch in line.epochs(10**9):
        for (batch,) in loader:
            now, after = time.perf_counter(), _seen(run_dir)
            steps.append((now - began, after != before or _is_written(after)))
            written |= {name for name in after if not name.startswith(".")}
            began, before = now, after
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(batch), batch))
            optimizer.step()
    line.close()
    last = max(_folder(run_dir).glob("step-*"))
    size = sum(file.stat().st_size for file in last.iterdir())
    print(json.dumps({"steps": steps, "bytes": size, "checkpoints": len(written)}))


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _seen(run_dir: Path) -> frozenset[str]:
    """What lies in the folder of the run's checkpoints; what is being removed does not count."""
    return frozenset(each.name for each in _folder(run_dir).glob("*"))


def _is_written(seen: frozenset[str]) -> bool:
    return any(name.startswith(".") for name in seen)


if __name__ == "__main__":
    work(Trial(**json.loads(sys.argv[1])), Path(sys.argv[2]))
