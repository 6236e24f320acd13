"""A worker for tests of learning: whatever a script may hold, with a digest of it after each step.

Usage: following.py SPEC.json OUT.json. In `slow` slots each step takes a while, so that a newcomer
can come near; its first steps take longer, if it `tarries`. Whoever came late stops the run some
steps after it is on a roster. If the run's last step is near, slot 0 may have to await a newcomer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

SAMPLES, BATCH, WIDTH = 52, 12, 6


class Net(nn.Module):
    """Running statistics, and a buffer that forward changes."""

    seen: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen * 0.5 + x.detach().mean()
        out: torch.Tensor = self.last(self.norm(self.first(x)).tanh())
        return out


class Average:
    """A moving average of what all workers measured: a state of the script's own."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = 0.9 * self.value + 0.1 * value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def data(seed: int, samples: int = SAMPLES) -> TensorDataset:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def add_to(digest: Any, thing: Any) -> None:
    """Adds a state to a digest, whatever the order of its keys."""
    if isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            digest.update(str(key).encode())
            add_to(digest, thing[key])
    elif isinstance(thing, list | tuple):
        for each in thing:
            add_to(digest, each)
    elif isinstance(thing, torch.Tensor):
        digest.update(thing.detach().contiguous().numpy().tobytes())
    else:
        digest.update(repr(thing).encode())


def gathered_loss(line: Line, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss of all workers' samples: their features go into it."""
    rows = line.gather({"out": out, "y": y})
    spread = (rows["out"] - rows["out"].mean()).square().mean()
    loss: torch.Tensor = F.mse_loss(rows["out"], rows["y"]) + 0.01 * spread
    return loss


def evaluate(line: Line, model: nn.Module) -> float:
    """The loss on other samples, of all workers together."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in line.split(DataLoader(data(9, 20), 4)):
            total += float(F.mse_loss(model(x), y)) * len(x)
            count += len(x)
    model.train()
    return line.mean(total / max(count, 1), count)


def await_ahead(line: Line, steps: int) -> None:
    """Waits until the member in slot 0 is so many steps ahead."""
    where = Path(sys.argv[2]).with_name("out-0.at")
    while int(where.read_text() or 0) < line.step + steps:
        time.sleep(0.01)


def await_newcomer(line: Line, awaited: dict[str, Any]) -> None:
    """From a step on, waits in each one until a newcomer attends, or for some seconds.

    Not for good in one step: a newcomer is sent the state as the next round opens.
    """
    attends = Path(sys.argv[2]).with_name(f"out-{awaited['slot']}.attends")
    until = time.monotonic() + awaited["each_s"]
    while line.step >= awaited["step"] and not attends.exists() and time.monotonic() < until:
        time.sleep(0.01)


def pause(line: Line, spec: dict[str, Any], bodies: int) -> None:
    """Makes members slow, and a learner at first slower."""
    if spec["slot"] in spec["slow"]:
        time.sleep(spec["pace_s"])
    if spec["slot"] == 0:
        Path(sys.argv[2]).with_suffix(".at").write_text(str(line.step))
        if "awaits" in spec:
            await_newcomer(line, spec["awaits"])
    if line.rank == line.world_size:
        Path(sys.argv[2]).with_suffix(".attends").touch()
        if not bodies:
            await_ahead(line, spec.get("ahead", 0))
        if bodies < spec["tarries"]:
            time.sleep(spec["pace_s"] * 8)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    train(Line(total_steps=spec["steps"]), spec)


def train(line: Line, spec: dict[str, Any]) -> None:
    average = Average()
    line.register("average", average)
    model: Any = Net(spec.get("width", 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    loader: Any = DataLoader(data(0), BATCH, shuffle=True)
    model, optimizer, scheduler, scaler, loader = line.prepare(
        model, optimizer, scheduler, scaler, loader
    )
    states: dict[str, str] = {}
    seen: dict[str, Any] = {"states": states, "places": [], "means": []}
    came_at = first_step = None

    def note(when: str = "") -> None:
        name = f"{line.step}{when}"
        digest = hashlib.sha256()
        parts = model, optimizer, scheduler, scaler, average
        add_to(digest, [each.state_dict() for each in parts])
        states[name] = digest.hexdigest()

    for epoch in line.epochs(10**6):
        for x, y in loader:
            began = line.step
            first_step = began if first_step is None else first_step
            seen["places"].append([line.step + 1, line.rank, line.world_size])
            pause(line, spec, len(states))
            if first_step and line.rank < line.world_size:
                came_at = line.step if came_at is None else came_at
                if line.step >= came_at + spec["stay"]:
                    line.stop("the newcomer has seen enough")
            with line.accumulate(2):
                optimizer.zero_grad()
                out = model(x)
                gathers = spec.get("gathers", False)
                loss = gathered_loss(line, out, y) if gathers else F.mse_loss(out, y)
                line.backward(scaler.scale(loss))
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            if line.committed:
                average.add(line.mean(line.loss or 0.0))
            if line.step > began:  # A void step leaves no trace once it is tried again.
                note()
        seen["means"].append([line.step, epoch, evaluate(line, model)])
        average.add(seen["means"][-1][2])
        note(" evaluated")
    Path(sys.argv[2]).write_text(json.dumps({**seen, "step": line.step}))


if __name__ == "__main__":
    main()
