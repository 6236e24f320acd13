"""Draws: a sampler's epochs are the same wherever, whenever and however often they are drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from andon_trainer.data.draws import EpochDraws, draw_once
from andon_trainer.state import rng

SIZE, SEED = 20, 7
CPU = torch.device("cpu")


def data() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE))


class OwnGenerators(Sampler[int]):
    """Draws from a generator of every kind."""

    def __init__(self) -> None:
        self.all: dict[str, Any] = {
            "torch": torch.Generator(),
            "numpy": [np.random.default_rng(), np.random.RandomState()],
            "python": random.Random(),
        }

    def __iter__(self) -> Iterator[int]:
        yield int(torch.randint(SIZE, (), generator=self.all["torch"]))
        yield int(self.all["numpy"][0].integers(SIZE))
        yield self.all["numpy"][1].randint(SIZE)
        yield self.all["python"].randrange(SIZE)


class GlobalGenerators(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            yield random.randrange(SIZE)
            yield int(np.random.randint(SIZE))
            yield int(torch.randint(SIZE, ()))


class Counting(Sampler[int]):
    """Has an epoch, which it counts itself or is told."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data, self.epoch = data, 0
        self.order = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.order)  # In place: what it was before matters.
        return iter([self.epoch, *self.order])


class Told(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch * 10

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, self.epoch + 1])


class Unseeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(SIZE))


def samplers() -> list[Any]:
    weights = [1.0] * SIZE
    return [
        WeightedRandomSampler(weights, 30),
        WeightedRandomSampler(weights, 9, replacement=False, generator=torch.Generator()),
        SubsetRandomSampler([3, 1, 4, 15, 9]),
        RandomSampler(data(), replacement=True, num_samples=11),
        RandomSampler(data(), generator=torch.Generator()),
        OwnGenerators(),
        GlobalGenerators(),
        Counting(data()),
    ]


@pytest.mark.parametrize("kind", range(len(samplers())))
def test_every_epoch_is_another_and_the_same_on_all_workers_in_any_order(kind: int) -> None:
    random.seed(kind)
    one, other = EpochDraws(samplers()[kind], data(), SEED), None
    torch.rand(3), random.random(), np.random.rand()  # Another worker has drawn other numbers.
    other = EpochDraws(samplers()[kind], data(), SEED)

    epochs = [one.draw(epoch) for epoch in range(4)]

    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [other.draw(epoch) for epoch in (3, 0, 2, 2, 1)] == [epochs[e] for e in (3, 0, 2, 2, 1)]
    assert EpochDraws(samplers()[kind], data(), SEED + 1).draw(0) != epochs[0]


@pytest.mark.parametrize("kind", range(len(samplers())))
def test_drawing_leaves_the_scripts_generators_and_its_sampler_alone(kind: int) -> None:
    sampler = samplers()[kind]
    own = getattr(sampler, "generator", None)
    before = rng.digests(rng.capture(CPU)), None if own is None else own.get_state().tolist()

    EpochDraws(sampler, data(), SEED).draw(2)
    draw_once(sampler, data(), SEED)

    after = rng.digests(rng.capture(CPU)), None if own is None else own.get_state().tolist()
    assert after == before
    assert getattr(sampler, "epoch", 0) == 0


def test_a_sampler_that_counts_its_epochs_is_drawn_as_often_as_a_plain_script_would() -> None:
    draws = EpochDraws(Counting(data()), data(), SEED)

    assert [draws.draw(epoch)[0] for epoch in (5, 0, 1)] == [6, 1, 2]


def test_set_epoch_is_called_whatever_the_script_has_called() -> None:
    sampler = Told(data())
    draws = EpochDraws(sampler, data(), SEED)
    sampler.set_epoch(99)

    assert draws.draw(4) == [40, 41]
    assert sampler.epoch == 990


def test_the_dataset_is_not_copied_with_its_sampler() -> None:
    class Huge(Dataset[int]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    sampler = Told(Huge())

    assert EpochDraws(sampler, data(), SEED).draw(1) == [10, 11]


def test_indices_of_other_types_are_plain_integers_and_keys_stay_as_they_are() -> None:
    keys: list[Any] = [np.int64(3), torch.tensor(4), (2, 640), "key", 1]

    drawn = EpochDraws(keys, data(), SEED).draw(0)

    assert drawn == [3, 4, (2, 640), "key", 1]
    assert [type(key) for key in drawn[:2]] == [int, int]


def test_a_sampler_whose_randomness_can_not_be_seeded_is_refused() -> None:
    with pytest.raises(ValueError, match="yields other indices each time"):
        EpochDraws(Unseeded(), data(), SEED)


def test_a_generator_function_can_be_drawn_only_once_and_is_refused() -> None:
    with pytest.raises(ValueError, match="give the DataLoader a list"):
        EpochDraws((index for index in range(3)), data(), SEED)


class Locked(OwnGenerators):
    """Can't be copied as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.file = (line for line in "ab")

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


def test_a_sampler_that_can_not_be_copied_whole_is_drawn_from_its_own_generator() -> None:
    sampler = Locked()
    before = sampler.generator.get_state().tolist()

    one, other = EpochDraws(sampler, data(), SEED), EpochDraws(Locked(), data(), SEED)

    assert one.draw(1) == other.draw(1) != one.draw(0)
    assert sampler.generator.get_state().tolist() == before


def test_a_sampler_without_an_end_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(SIZE))

    with pytest.raises(ValueError, match="has yielded 1048576 indices and does not end"):
        EpochDraws(Endless(), data(), SEED)
