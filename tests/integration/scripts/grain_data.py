"""A worker for tests of equal bits: the ways in which samples come to a script.

Usage: grain_data.py SPEC.json OUT.json. `kind`: a `stream` of unknown length, the `batches` of a
batch sampler, of different sizes, or indices (`shards`) whose batches are accumulated. `loading`:
processes that load them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from andon_trainer import Line

NUMBERS = torch.arange(40.0).reshape(40, 1)
BATCHES = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19, 20], [30]]


class Numbers(IterableDataset[torch.Tensor]):
    """Does not say that it has 26 items."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(NUMBERS[:26])


def loader_of(kind: str, loading: int) -> list[Any]:
    """`loading`: processes that load."""
    if kind == "stream":
        return [DataLoader(Numbers(), 8, num_workers=loading)]
    if kind == "batches":
        data = TensorDataset(NUMBERS)
        return [DataLoader(data, batch_sampler=BATCHES, num_workers=loading)]
    return []


def batches_of(kind: str, line: Line, loaders: list[Any]) -> Iterator[torch.Tensor]:
    if not loaders:
        yield from (NUMBERS[shard.indices] for shard in line.shards(26, 8))
    for batch in loaders[0] if loaders else ():
        yield batch if kind == "stream" else batch[0]


def trained(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model with dropout: of bfloat16 for a stream, with sparse gradients for batches."""
    if kind == "batches":
        sparse = nn.Embedding(len(NUMBERS), 4, sparse=True)
        model = nn.Sequential(sparse, nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    if kind == "stream":
        model = model.to(torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind: str = spec["kind"]
    line = Line(same_bits=True, total_steps=11)
    model, optimizer = trained(kind)
    _, _, *loaders = line.prepare(
        model, optimizer, *loader_of(kind, spec.get("loading", 0)), micro_batch_size=3
    )
    losses = {}
    for _ in line.epochs(99):
        for batch in batches_of(kind, line, loaders):
            x = batch.to(model[-1].weight.dtype)
            with line.accumulate(2 if kind == "shards" else 1):
                optimizer.zero_grad(set_to_none=False)
                line.backward(F.mse_loss(model(batch.long() if kind == "batches" else x), x))
                optimizer.step()
            if line.loss is not None:
                losses[line.step] = line.loss
    weights = b"".join(each.detach().float().numpy().tobytes() for each in model.parameters())
    line.close()
    seen = {"digest": hashlib.sha256(weights).hexdigest(), "losses": losses}
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
