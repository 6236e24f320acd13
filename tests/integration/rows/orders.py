"""Rows of samplers and batch samplers of a script's own, and of random augmentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from andon.protocol.records import PositionRange
from andon_trainer.data.draws import EpochDraws
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from integration.rows.features import network, plain_body, sgd
from integration.rows.row import CLASSES, Parts, Row, Vectors

__all__ = ["ORDERS"]

BATCH = 8
SIZES = [9, 1, 6, 4, 8, 2, 7, 3, 5, 5]


class Augmented(Vectors):
    """Vectors with noise from torch's global generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


def weighted_parts() -> Parts:
    data = Augmented()
    weights = torch.where(data.y == 0, 3.0, 1.0)
    sampler = WeightedRandomSampler(weights.tolist(), 30)
    model = network()
    return Parts(model, sgd(model), DataLoader(data, BATCH, sampler=sampler, num_workers=1))


def loaded_here(parts: Parts, epoch: int, positions: Sequence[int]) -> Any:
    """The union batch as one process without loading processes loads it."""
    loader = DataLoader(parts.loader.dataset, BATCH, sampler=parts.loader.sampler)
    feeder = LoaderFeeder(loader, seed=0)
    share = Share(epoch, (PositionRange(min(positions), max(positions) + 1),))
    (micro_batch,) = feeder.batches(share, lambda: iter(()))
    return micro_batch.batch


class Sequences(Dataset[torch.Tensor]):
    """Made-up sequences of 3 to 12 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 13, (50,), generator=generator).tolist()
        self.tokens = [torch.randint(CLASSES, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


class Buckets(Sampler[list[int]]):
    """Batches of like lengths, each of another size, in random order."""

    def __init__(self, data: Sequences) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.data)).tolist()
        order.sort(key=lambda index: len(self.data[index]) // 3)
        batches = torch.split(torch.tensor(order), SIZES)
        return iter([batches[number].tolist() for number in torch.randperm(len(SIZES))])


class Tagger(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES + 1, 6)
        self.lstm = nn.LSTM(6, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return out


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=CLASSES)


def bucket_parts() -> Parts:
    data, model = Sequences(), Tagger()
    loader = DataLoader(data, batch_sampler=Buckets(data), collate_fn=padded)
    return Parts(model, sgd(model), loader)


def bucket_body(parts: Parts, tokens: torch.Tensor, line: Any) -> None:
    targets = tokens[:, 1:]
    known = targets != CLASSES
    loss = F.cross_entropy(parts.model(tokens[:, :-1])[known], targets[known])
    parts.optimizer.zero_grad()
    line.backward(loss, weight=int(known.sum()))
    parts.optimizer.step()


def bucket(parts: Parts, epoch: int, positions: Sequence[int]) -> Any:
    """The whole batch of the sampler, from which the step's positions are."""
    data = parts.loader.dataset
    batches = EpochDraws(parts.loader.batch_sampler, data, 0).draw(epoch)
    (number,) = {position // max(SIZES) for position in positions}
    return padded([data[index] for index in batches[number]])


ORDERS = {
    "own sampler, augmented": Row(weighted_parts, plain_body, union=loaded_here),
    "length buckets": Row(bucket_parts, bucket_body, union=bucket, micro_batch_size=3, steps=16),
}
