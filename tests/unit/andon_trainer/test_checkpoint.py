"""Checkpoints: bit-exact, whole or not there, without pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from andon_trainer.checkpoint import load_checkpoint, save_checkpoint
from andon_trainer.state import weights_digest

MAKERS: list[Callable[[nn.Module], Optimizer]] = [
    lambda model: AdamW(model.parameters(), lr=0.1, amsgrad=True),
    lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: SGD(model.parameters(), lr=0.1),
]


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_bit_exactly_from_a_checkpoint(
    tmp_path: Path, maker: Callable[[nn.Module], Optimizer], dtype: torch.dtype
) -> None:
    model = model_of(0, dtype)
    optimizer = maker(model)
    scheduler = CosineAnnealingLR(optimizer, T_max=9)
    train(model, optimizer, scheduler, 3)
    folder = save_checkpoint(
        tmp_path / "a" / "step-3", [model], [optimizer], {"step": 3}, {"scheduler": scheduler}
    )
    train(model, optimizer, scheduler, 4)

    other = model_of(1, dtype)
    other_optimizer = maker(other)
    other_scheduler = CosineAnnealingLR(other_optimizer, T_max=9)
    facts = load_checkpoint(folder, [other], [other_optimizer], {"scheduler": other_scheduler})
    train(other, other_optimizer, other_scheduler, 4)

    assert facts == {"step": 3}
    assert weights_digest([other]) == weights_digest([model])
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_an_optimizers_state_comes_back_equal_in_values_and_types(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = MAKERS[0](model)
    train(model, optimizer, CosineAnnealingLR(optimizer, T_max=9), 2)
    folder = save_checkpoint(tmp_path / "c", [model], [optimizer], {})

    other = model_of(1)
    other_optimizer = MAKERS[0](other)
    load_checkpoint(folder, [other], [other_optimizer])

    mine, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert type(theirs["param_groups"][0]["betas"]) is tuple
    for key, state in mine["state"].items():
        assert all(torch.equal(state[name], theirs["state"][key][name]) for name in state)


def test_several_models_and_optimizers_are_kept_apart(tmp_path: Path) -> None:
    models = [model_of(0), model_of(1)]
    optimizers = [MAKERS[0](models[0]), MAKERS[1](models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, CosineAnnealingLR(optimizer, T_max=9), 2)
    folder = save_checkpoint(tmp_path / "c", models, optimizers, {})
    others = [model_of(2), model_of(3)]
    load_checkpoint(folder, others, [MAKERS[0](others[0]), MAKERS[1](others[1])])

    assert weights_digest(others) == weights_digest(models)


def test_the_folder_holds_no_pickle_and_no_draft(tmp_path: Path) -> None:
    model = model_of(0)

    folder = save_checkpoint(tmp_path / "step-1", [model], [MAKERS[0](model)], {"cursor": [0, 4]})

    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "registered.json",
        "registered.safetensors",
        "state.json",
    ]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    model = model_of(0)
    save_checkpoint(tmp_path / "c", [model], [], {"step": 1})

    save_checkpoint(tmp_path / "c", [model], [], {"step": 2})

    assert load_checkpoint(tmp_path / "c", [model], []) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    model = model_of(0)
    save_checkpoint(tmp_path / "c", [model], [], {"step": 1})

    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "c", [model], [], {"step": object()})

    assert load_checkpoint(tmp_path / "c", [model], []) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model, other = model_of(0), nn.Linear(3, 4)
    optimizer = MAKERS[1](other)
    folder = save_checkpoint(tmp_path / "c", [model], [MAKERS[1](model)], {})
    before = weights_digest([other])

    with pytest.raises(ValueError, match=r"weight is float32\[4, 3\] here and missing there"):
        load_checkpoint(folder, [other], [optimizer])

    assert weights_digest([other]) == before


def test_missing_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    model = model_of(0)
    folder = save_checkpoint(tmp_path / "c", [model], [], {})
    (folder / "optimizer.json").write_text("{")

    with pytest.raises(ValueError, match=r"optimizer\.json is damaged"):
        load_checkpoint(folder, [model], [])
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none", [model], [])


def test_other_numbers_of_optimizers_and_other_registered_names_are_refused(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = MAKERS[0](model)
    folder = save_checkpoint(tmp_path / "c", [model], [optimizer], {}, {"ema": optimizer})

    with pytest.raises(ValueError, match="has 1 optimizers, the script 0"):
        load_checkpoint(folder, [model], [], {"ema": optimizer})
    with pytest.raises(ValueError, match=r"\['ema'\] registered"):
        load_checkpoint(folder, [model], [optimizer])
