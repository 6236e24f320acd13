"""A script with samplers of its own: its resume, its random numbers and its loader's attributes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    WeightedRandomSampler,
)

from andon_trainer import Line
from unit.andon_trainer.solo import model

SIZE = 20


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((5,), float(index)) + random.random(), torch.tensor([float(index)])


class Counting(Sampler[int]):
    """Depends on its own past: it counts its epochs, and shuffles in place."""

    def __init__(self) -> None:
        self.epoch, self.order = 0, list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.order)
        return iter([*self.order[:9], self.epoch])


class Buckets(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE)
        return iter(part.tolist() for part in torch.split(order, [9, 4, 6, 1]))


def loaders() -> dict[str, DataLoader[Any]]:
    data = Noisy()
    return {
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * SIZE, 10)),
        "counting": DataLoader(data, 4, sampler=Counting()),
        "buckets": DataLoader(data, batch_sampler=Buckets()),
    }


def train(loader: DataLoader[Any], epochs: int, **settings: Any) -> list[Any]:
    """The batches of a run, each with the loss."""
    torch.manual_seed(0)
    seen = []
    with Line(seed=3, device="cpu", **settings) as line:
        net = model()
        net, optimizer, prepared = line.prepare(
            net, torch.optim.SGD(net.parameters(), lr=1e-4), loader
        )
        for _epoch in line.epochs(epochs):
            for x, y in prepared:
                optimizer.zero_grad()
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
                seen.append((line.step, x.tolist(), line.loss))
    return seen


@pytest.mark.parametrize("kind", list(loaders()))
def test_a_run_that_is_resumed_in_a_later_epoch_gets_that_epochs_samples(
    kind: str, tmp_path: Path
) -> None:
    whole = train(loaders()[kind], 4)
    steps = len(whole) // 4 * 2 + 1  # In the middle of epoch 2.

    train(loaders()[kind], 4, run_dir=tmp_path, checkpoint_every=steps, total_steps=steps)
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    random.seed(99)
    rest = train(loaders()[kind], 4, resume=folder)

    assert rest == whole[steps:]


def test_the_scripts_random_numbers_are_those_that_it_would_have_without_the_line() -> None:
    torch.manual_seed(5)
    random.seed(5)
    alone = torch.rand(3).tolist(), random.random()

    torch.manual_seed(5)
    random.seed(5)
    with Line(seed=3, device="cpu") as line:
        loader: Any = line.prepare(
            torch.nn.Linear(5, 1, device="meta").to_empty(device="cpu"), loaders()["weighted"]
        )[1]
        next(iter(loader))
        found = torch.rand(3).tolist(), random.random()

    assert found == alone


def test_a_script_made_for_ddp_may_keep_its_sampler_and_set_its_epoch() -> None:
    data, net = Noisy(), model()
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1)
    seen = []
    with Line(seed=3, device="cpu") as line:
        net, optimizer, loader = line.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, 10, sampler=sampler)
        )
        for epoch in line.epochs(1):
            loader.sampler.set_epoch(epoch)
            for _x, y in loader:
                seen += y.reshape(-1).tolist()
                line.backward(net(torch.zeros(1, 5)).sum())
                optimizer.step()

    assert sorted(seen) == [float(index) for index in range(SIZE)]
