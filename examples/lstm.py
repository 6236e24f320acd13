"""An LSTM learns to count: sequences of many lengths, in batches of about the same length.

Run it alone, or with `andon run --workers 2 examples/lstm.py` to the same result.
A batch sampler of one's own puts sequences of similar length together, so that little is padding.
The loss is a mean over tokens, and workers differ in how many they have: `weight=` says it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from andon_trainer import Line


def sequence(index: int) -> tuple[Tensor, Tensor]:
    """Bits, and after each one the number of ones so far, modulo 3."""
    draw = torch.Generator().manual_seed(index)
    bits = torch.randint(0, 2, (int(torch.randint(3, 30, (), generator=draw)),), generator=draw)
    return bits, bits.cumsum(0) % 3


class Buckets(Sampler[list[int]]):
    """Batches of sequences that are about as long, in random order."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:  # The line seeds torch's generator for each epoch.
        shuffled = torch.randperm(len(self.lengths)).tolist()
        ordered = sorted(shuffled, key=lambda index: self.lengths[index])
        for batch in torch.randperm(len(self)).tolist():
            yield ordered[batch * self.batch_size : (batch + 1) * self.batch_size]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Inputs (sequences, length) and targets, padded to the longest; -100 is no target."""
    bits, counts = (list(part) for part in zip(*samples, strict=True))
    padded = pad_sequence(bits, batch_first=True)
    return padded, pad_sequence(counts, batch_first=True, padding_value=-100)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
line = Line(seed=1, total_steps=options.steps)
torch.manual_seed(1)
data: Any = [sequence(index) for index in range(500)]
layers = {"embedding": nn.Embedding(2, 8), "lstm": nn.LSTM(8, 32, batch_first=True)}
model: Any = nn.ModuleDict({**layers, "head": nn.Linear(32, 3)})
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
buckets = Buckets([len(bits) for bits, _ in data], batch_size=32)
loader: Any = DataLoader(data, batch_sampler=buckets, collate_fn=collate)
model, optimizer, loader = line.prepare(model, optimizer, loader)

for _ in line.epochs(options.steps):  # `total_steps` ends the run, in mid-epoch or not.
    for bits, counts in loader:
        optimizer.zero_grad()
        states, _ = model["lstm"](model["embedding"](bits))
        scores = model["head"](states).movedim(-1, 1)
        loss = F.cross_entropy(scores, counts)  # ignores -100
        line.backward(loss, weight=int((counts != -100).sum()))
        optimizer.step()
if line.is_main:
    print(f"step {line.step}: loss {line.loss:.6f}")
