"""A checkpoint: bit-exact, whole or not there, without pickle, refused by digest."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from andon.host.manifest import CheckpointFacts
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon_trainer import CheckpointRefused
from andon_trainer.state.checkpoint_files import Stateful
from andon_trainer.state.replica import Replica

MAKERS: list[Callable[[nn.Module], Optimizer]] = [
    lambda model: AdamW(model.parameters(), lr=0.1, amsgrad=True),
    lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: SGD(model.parameters(), lr=0.1),
]


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)


def replica_of(
    seed: int,
    maker: Callable[[nn.Module], Optimizer] = MAKERS[0],
    dtype: torch.dtype = torch.float32,
) -> Replica:
    model = model_of(seed, dtype)
    optimizer = maker(model)
    replica = Replica([model], [optimizer])
    replica.register("scheduler", CosineAnnealingLR(optimizer, T_max=9))
    return replica


def train(replica: Replica, steps: int) -> None:
    model, optimizer = replica.modules[0], replica.optimizers[0]
    scheduler = replica.registered["scheduler"]
    assert isinstance(scheduler, CosineAnnealingLR)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()


def facts_of(replica: Replica, step: int = 3) -> CheckpointFacts:
    return CheckpointFacts(
        head=Key(2**63, step),
        step=step,
        cursor=Cursor(0, 8 * step),
        digest=replica.digest().hex(),
        plan=RunPlan(global_batch=8, seed=2**64 - 1),
        pacing=b"\0what the coordinator knew",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_bit_exactly_from_a_checkpoint(
    tmp_path: Path, maker: Callable[[nn.Module], Optimizer], dtype: torch.dtype
) -> None:
    old, new = replica_of(0, maker, dtype), replica_of(1, maker, dtype)
    train(old, 3)
    folder = old.save(tmp_path / "a" / "step-3", facts_of(old))
    facts = facts_of(old)
    train(old, 4)

    loaded, _ = new.load(folder)
    train(new, 4)

    assert loaded == facts
    assert new.digest() == old.digest()


def test_facts_from_before_there_was_a_pace_are_read() -> None:
    facts = replace(facts_of(replica_of(0)), pacing=b"")

    assert "pacing" not in facts.to_json()
    assert CheckpointFacts.from_json(facts.to_json()) == facts


def test_several_models_and_optimizers_are_kept_apart(tmp_path: Path) -> None:
    old, new = ([model_of(seed), model_of(seed + 1)] for seed in (0, 2))
    one = Replica(old, [MAKERS[0](old[0]), MAKERS[1](old[1])])
    other = Replica(new, [MAKERS[0](new[0]), MAKERS[1](new[1])])

    other.load(one.save(tmp_path / "c", facts_of(one)))

    assert other.digest() == one.digest()


def test_the_folder_holds_no_pickle_and_no_draft(tmp_path: Path) -> None:
    replica = replica_of(0)

    folder = replica.save(tmp_path / "step-1", facts_of(replica))

    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    trees = ("model", "optimizers", "registered", "rng")
    expected = {f"{tree}.{kind}" for tree in trees for kind in ("json", "safetensors")}
    assert {entry.name for entry in folder.iterdir()} == {*expected, "state.json"}


def test_a_checkpoint_and_its_folders_are_their_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        replica = replica_of(0)
        folder = replica.save(tmp_path / "run/checkpoints/step-00000001", facts_of(replica))
    finally:
        os.umask(before)

    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert folder in made
    for each in made:
        wanted = 0o700 if each.is_dir() else 0o600
        assert stat.S_IMODE(each.stat().st_mode) == wanted, each


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    replica = replica_of(0)
    replica.save(tmp_path / "c", facts_of(replica, 1))

    replica.save(tmp_path / "c", facts_of(replica, 2))

    assert replica.load(tmp_path / "c")[0].step == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    replica = replica_of(0)
    replica.save(tmp_path / "c", facts_of(replica, 1))
    odd = _Holding({})
    replica.register("odd", odd)
    odd.state["set"] = {1}

    with pytest.raises(TypeError, match=r"set is a set"):
        replica.save(tmp_path / "c", facts_of(replica, 2))

    assert replica_of(1).load(tmp_path / "c")[0].step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    old = replica_of(0)
    folder = old.save(tmp_path / "c", facts_of(old))
    other = nn.Linear(3, 4)
    new = Replica([other], [MAKERS[0](other)])
    before = new.digest()

    with pytest.raises(CheckpointRefused, match=r"weight is float32\[4, 3\] here and missing"):
        new.load(folder)

    assert new.digest() == before


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizers.safetensors", "registered.json", "rng.json"]
)
def test_a_changed_byte_is_refused_by_digest_and_the_file_is_named(
    tmp_path: Path, file: str
) -> None:
    old, new = replica_of(0), replica_of(1)
    folder = old.save(tmp_path / "c", facts_of(old))
    data = bytearray((folder / file).read_bytes())
    data[-1] ^= 1
    (folder / file).write_bytes(data)
    before = new.digest()

    with pytest.raises(
        CheckpointRefused, match=r"holds other bytes: SHA-256 .*--resume-step"
    ) as it:
        new.load(folder)

    assert it.value.file == folder / file
    assert it.value.exit_code == 4
    assert new.digest() == before


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, 4)


def edit(folder: Path) -> None:
    file = folder / "state.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 4'))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (cut, r"has 4 bytes and was written with \d{3}"),
        (lambda folder: (folder / "optimizers.json").unlink(), r"optimizers\.json is missing"),
        (edit, r"state\.json was changed since it was written"),
        (shutil.rmtree, "there is no checkpoint in"),
    ],
    ids=["cut", "missing", "edited", "none"],
)
def test_a_checkpoint_that_is_not_as_it_was_written_is_refused_by_what_differs(
    tmp_path: Path, harm: Callable[[Path], None], why: str
) -> None:
    replica = replica_of(0)
    harm(replica.save(tmp_path / "c", facts_of(replica)))

    with pytest.raises(CheckpointRefused, match=why):
        replica.load(tmp_path / "c")


def test_another_number_of_optimizers_and_a_state_that_is_lacking_are_refused(
    tmp_path: Path,
) -> None:
    old = replica_of(0)
    folder = old.save(tmp_path / "c", facts_of(old))
    model = model_of(1)
    fewer = Replica([model], [])
    more = replica_of(1)
    more.register("average", _Holding({}))

    with pytest.raises(CheckpointRefused, match="the state has 1 optimizers, this script 0"):
        fewer.load(folder)
    with pytest.raises(CheckpointRefused, match="has no state of average"):
        more.load(folder)


def test_what_is_registered_after_the_load_gets_its_state_then(tmp_path: Path) -> None:
    old = replica_of(0)
    old.register("average", _Holding({"decay": 0.5}))
    new, late = replica_of(1), _Holding({})
    new.load(old.save(tmp_path / "c", facts_of(old)))

    new.register("average", late)

    assert late.state == {"decay": 0.5}


class _Holding(Stateful):
    """Something with a state."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        self.state = state_dict
