"""A worker of the benchmark of spikes: it trains, and does what was planted for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from convergence_tasks import Drawn, task_of, unseen_loss
from spikes import LOUD, SpikeKind, SpikeSpec
from torch import Tensor, nn
from torch.utils.data import DataLoader

from andon_trainer import Line


def work(spec: SpikeSpec) -> dict[str, Any]:
    """Trains; returns the loss on unseen data."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    task = task_of(spec.task)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    planted = {batch: (SpikeKind(kind), slot) for batch, kind, slot in spec.planted}
    line = Line(address=spec.address, run_id=spec.run_id)
    drawn = Drawn(task, spec.batch * spec.batches, spec.seed)
    model, optimizer, loader = line.prepare(
        model, optimizer, DataLoader(drawn, batch_size=spec.batch)
    )
    for _ in line.epochs(1):
        for x, y, positions in loader:
            kind, slot = planted.get(int(positions[0]) // spec.batch, (None, -1))
            mine = slot in (-1, line.rank)
            model.zero_grad()
            with _loud_block(model) if kind is SpikeKind.BLOCK and mine else nullcontext():
                loss = task.loss_of(model, x, y)
                loud = mine and kind in (SpikeKind.BATCH, SpikeKind.DATA)
                line.backward(loss * LOUD if loud else loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    told = {"loss": unseen_loss(task, model), "steps": line.step}
    line.close()
    return told


@contextmanager
def _loud_block(model: nn.Module) -> Iterator[None]:
    """Makes the gradient of one parameter far too large, as a wrong scale in a kernel does."""
    largest = max(model.parameters(), key=Tensor.numel)
    hook = largest.register_hook(  # type: ignore[no-untyped-call]  # torch's own signature
        lambda gradient: gradient * (10 * LOUD)
    )
    try:
        yield
    finally:
        hook.remove()


if __name__ == "__main__":
    for given in sys.stdin:
        print(json.dumps(work(SpikeSpec.from_json(given))), flush=True)
