"""Trains all models of the zoo, one after another: on lines of two workers, or in one process.

Usage: visit.py SPEC.json OUT.json. `lines` of the spec has an address and a run for each model;
without it the models are trained by plain PyTorch, on the union batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from andon.protocol.order import Order
from andon_trainer import Line
from andon_trainer.state.weights import weights_digest
from models.zoo import BATCH, SAMPLES, ZOO, Animal, Batch, Rows

STEPS = 20


def optimizer_of(model: nn.Module, animal: Animal) -> torch.optim.Optimizer:
    if animal.adam:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_on_a_line(animal: Animal, line: Line) -> tuple[nn.Module, list[float | None]]:
    """A script with its five lines changed."""
    model = animal.make()
    optimizer = optimizer_of(model, animal)
    loader: Any = DataLoader(Rows(animal), BATCH, shuffle=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    losses = []
    for _epoch in line.epochs(10**6):
        for batch in loader:
            optimizer.zero_grad()
            weight = animal.weight(batch) if animal.weight else None
            line.backward(animal.loss(model, batch), weight=weight)
            if animal.adam:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(line.loss)
    return model, losses


def train_plainly(animal: Animal) -> tuple[nn.Module, list[float]]:
    """The script as it was, on what both workers get together."""
    model = animal.make()
    optimizer = optimizer_of(model, animal)
    losses = []
    for _step, batch in zip(range(STEPS), unions(Rows(animal)), strict=False):
        optimizer.zero_grad()
        losses.append(backward_by_shares(model, animal, batch))
        if animal.adam:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, losses


def unions(data: Rows) -> Iterator[Batch]:
    for epoch in count():
        order = Order(0, epoch, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            yield default_collate([data[int(order[start + each])] for each in range(BATCH)])


def backward_by_shares(model: nn.Module, animal: Animal, batch: Batch) -> float:
    """Backward of a batch; with BatchNorm of each half by itself, as two workers do."""
    if not animal.normalizes:
        loss = animal.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        return loss.item()
    total = 0.0
    for rank in range(2):
        before = [buffer.clone() for buffer in model.buffers()]
        half = {name: part.chunk(2)[rank] for name, part in batch.items()}
        loss = animal.loss(model, half) / 2
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        total += loss.item()
        if rank:  # The running statistics are those of rank 0.
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
    return total


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name in spec["names"]:
        torch.manual_seed(1 + spec["slot"])  # Rank 0's weights go to the others.
        losses: list[Any]
        if "lines" in spec:
            address, run_id = spec["lines"][name]
            folder = str(out.parent / f"run-{name}")
            with Line(
                address=address, run_id=run_id, total_steps=STEPS,
                run_dir=folder, checkpoint_every=STEPS // 2,
            ) as line:  # fmt: skip
                model, losses = train_on_a_line(ZOO[name], line)
        else:
            model, losses = train_plainly(ZOO[name])
        torch.save(model.state_dict(), out.with_name(f"{out.stem}-{name}.pt"))
        seen[name] = {"losses": losses, "digest": weights_digest([model]).hex()}
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
