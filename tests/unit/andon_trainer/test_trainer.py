"""The Trainer, alone: it goes on from a checkpoint as it would have without a stop."""

from __future__ import annotations

import random
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from andon_trainer import Callback, Fit, Report, Trainer
from andon_trainer.trainer import samples_in


@pytest.fixture(autouse=True)
def _run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANDON_RUN_DIR", str(tmp_path))


class Seen(Callback):
    """Notes which checkpoints it is told of."""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def on_checkpoint(self, folder: Path) -> None:
        self.folders.append(folder.name)


def fit(steps: int, seen: Seen) -> Report:
    random.seed(0)
    x = torch.randn(22, 5, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 1)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        data=lambda: (data, data),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        callbacks=[seen],
    )
    settings = Fit(batch_size=8, steps=steps, checkpoint_every=4, evaluate_every=3, seed=2)
    return trainer.fit(settings)


def test_a_fit_goes_on_from_its_checkpoint_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(9, Seen())
    monkeypatch.setenv("ANDON_RESUME", str(tmp_path / "checkpoints/step-00000004"))

    resumed = fit(9, Seen())

    assert resumed.digest == whole.digest
    assert resumed.losses == whole.losses[4:]
    assert resumed.evaluations == whole.evaluations[1:]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (UserDict(ids=torch.zeros(3, 5), text=["a", "b", "c"]), 3),  # as a tokenizer's encoding
        (UserDict(text=["a", "b", "c"], ids=torch.zeros(3, 5)), 3),
        ({"scale": torch.tensor(2.0), "x": (torch.zeros(4),)}, 4),
        ([torch.zeros(6, 2), torch.zeros(6)], 6),
    ],
    ids=["encoding", "text first", "a number first", "pair"],
)
def test_any_mapping_or_sequence_tells_how_many_samples_it_holds(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize("batch", [["a", "b"], "text", torch.tensor(1.0), {"a": None}, 3])
def test_a_batch_without_samples_is_an_error_that_says_what_to_return(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"let `loss` return \(mean, weight\)"):
        samples_in(batch)


def test_callbacks_are_told_of_every_checkpoint_also_of_the_last_steps() -> None:
    seen = Seen()

    fit(8, seen)

    assert seen.folders == ["step-00000004", "step-00000008"]
