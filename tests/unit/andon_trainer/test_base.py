"""The base: hashed once, found changed if it is, and kept once for all checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from andon.host.manifest import MANIFEST, Manifest
from andon.protocol.capabilities import HASHED_BASE
from andon_trainer import Line
from andon_trainer.errors import CheckpointRefused
from andon_trainer.model.layout import plan_model
from andon_trainer.state.base import Base
from andon_trainer.state.held_state import HeldState
from andon_trainer.state.replica import Replica
from andon_trainer.state.weights import weights_digest
from unit.andon_trainer.solo import data


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, and a norm with running statistics."""

    def __init__(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(5, 7).to(dtype).requires_grad_(False)
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(x.to(self.frozen.weight.dtype)).to(x) + self.up(self.down(x))
        outcome: torch.Tensor = self.head(self.norm(hidden))
        return outcome


def replica_of(model: nn.Module) -> Replica:
    replica = Replica([model])
    replica.mark(plan_model([model]))
    return replica


def train(folder: Path, model: nn.Module, *, every: int = 1, **settings: Any) -> list[Path]:
    """Trains two epochs of three steps, with checkpoints; their folders, oldest first."""
    line = Line(seed=3, device="cpu", run_dir=str(folder), checkpoint_every=every, **settings)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(data(), 8, drop_last=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    for _ in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(model(x), y))
            optimizer.step()
    line.close()
    return sorted((folder / "checkpoints").glob("step-*"))


def base_of(checkpoint: Path) -> Path:
    (file,) = checkpoint.glob("base-*.safetensors")
    return file


def test_frozen_weights_are_hashed_once_however_often_the_digest_is_asked_for() -> None:
    model = Adapted()
    replica = replica_of(model)

    before = replica.digest()
    with torch.no_grad():
        model.head.weight.add_(1)
    after = replica.digest()

    assert replica.base.hashed == 2
    assert before != after
    assert replica.weights().sha256 == after


@pytest.mark.parametrize("how", ["in place", "behind torch's back", "another tensor"])
def test_a_frozen_weight_that_was_changed_is_hashed_again(how: str) -> None:
    model = Adapted()
    replica = replica_of(model)
    before = replica.digest()

    with torch.no_grad():
        if how == "in place":
            model.frozen.weight.add_(1)
        elif how == "behind torch's back":
            model.frozen.weight.data.mul_(2)  # Torch does not count this write.
        else:
            model.frozen.weight.data = model.frozen.weight + 1
    after = replica.digest()

    assert replica.base.hashed == 3
    assert before != after
    assert replica_of(model).digest() == after


def test_a_coordinator_of_an_earlier_version_gets_a_digest_with_the_elements_themselves() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    parts = (("weight", b"2,3", model.weight), ("bias", b"2", model.bias))
    expected = b"".join(
        b"\0".join((name.encode(), b"float32", shape, part.detach().numpy().tobytes()))
        for name, shape, part in parts
    )
    replica = replica_of(model)

    plain, hashed = replica.weights(()), replica.weights((HASHED_BASE,))

    assert plain.sha256 == hashlib.sha256(expected).digest()
    assert (plain.base_hashed, hashed.base_hashed) == (False, True)
    assert hashed.sha256 == replica.digest()


def test_a_digest_without_frozen_weights_is_of_one_kind_only() -> None:
    replica = replica_of(nn.Linear(3, 2))

    assert replica.weights(()) == replica.weights((HASHED_BASE,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_base_may_have_any_type(dtype: torch.dtype) -> None:
    first, same = replica_of(Adapted(dtype=dtype)), replica_of(Adapted(dtype=dtype))
    other = replica_of(Adapted(seed=1, dtype=dtype))

    assert first.digest() == same.digest() != other.digest()


@pytest.mark.parametrize("model", [nn.Linear(3, 2), Adapted()], ids=["all", "a part"])
def test_a_script_computes_the_digest_of_the_line(model: nn.Module) -> None:
    assert replica_of(model).digest() == weights_digest([model])


def test_checkpoints_of_a_run_have_one_file_of_frozen_weights(tmp_path: Path) -> None:
    model = Adapted()

    checkpoints = train(tmp_path, model)

    bases = [base_of(checkpoint) for checkpoint in checkpoints]
    assert len(checkpoints) == 4
    assert len({base.stat().st_ino for base in bases}) == 1
    for checkpoint, base in zip(checkpoints, bases, strict=True):
        trained = load_file(checkpoint / "model.safetensors")
        assert set(load_file(base)) == {"frozen.weight", "frozen.bias"}
        assert set(trained) | set(load_file(base)) == set(model.state_dict())
        Manifest.read(checkpoint).verify(checkpoint)


def test_a_base_that_changes_is_written_anew(tmp_path: Path) -> None:
    model = Adapted()
    replica = replica_of(model)
    line_of = train(tmp_path, model)[-1]
    facts = Manifest.read(line_of).facts
    before = base_of(line_of).name

    with torch.no_grad():
        model.frozen.weight.add_(1)
    later = replica.save(tmp_path / "checkpoints" / "step-00000099", facts)

    assert base_of(later).name != before
    assert torch.equal(load_file(base_of(later))["frozen.weight"], model.frozen.weight)


def test_a_run_goes_on_from_a_checkpoint_and_its_base(tmp_path: Path) -> None:
    model, twin = Adapted(), Adapted(seed=9)
    checkpoints = train(tmp_path / "a", model)

    train(tmp_path / "b", twin, resume=str(checkpoints[-1]))

    assert weights_digest([twin]) == weights_digest([model])


def test_a_damaged_base_is_refused_by_its_name(tmp_path: Path) -> None:
    checkpoint = train(tmp_path / "a", Adapted())[-1]
    base = base_of(checkpoint)
    base.write_bytes(base.read_bytes()[:-1] + b"?")

    with pytest.raises(CheckpointRefused, match=rf"{base.name} holds other bytes"):
        train(tmp_path / "b", Adapted(), resume=str(checkpoint))


def test_a_base_of_a_checkpoint_that_cant_be_read_is_not_linked_to(tmp_path: Path) -> None:
    model = Adapted()
    replica = replica_of(model)
    first = train(tmp_path, model)[-1]
    facts = Manifest.read(first).facts
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        (checkpoint / MANIFEST).write_text("{}")

    later = replica.save(tmp_path / "checkpoints" / "step-00000099", facts)

    assert base_of(later).stat().st_ino != base_of(first).stat().st_ino


def test_looking_at_an_empty_base_finds_nothing() -> None:
    assert Base().digest([("weight", torch.ones(2))]) == b""


@pytest.mark.parametrize("frozen", [True, False])
def test_a_state_ends_with_the_base_and_is_installed_as_ever(frozen: bool) -> None:
    model, twin = Adapted(dtype=torch.bfloat16), Adapted(seed=4, dtype=torch.bfloat16)
    if not frozen:
        model.requires_grad_(True)
        twin.requires_grad_(True)
    giver, newcomer = replica_of(model), replica_of(twin)

    data, base = bytes(giver.packed()), giver.base_elements()
    newcomer.install(data)

    assert len(base) == (2 * (5 * 7 + 7) if frozen else 0)
    assert data.endswith(base)
    assert newcomer.base_elements() == base
    assert newcomer.digest() == giver.digest()


def test_what_a_window_of_local_steps_may_undo_is_held_without_the_base() -> None:
    model = Adapted()
    held = HeldState(replica_of(model), torch.device("cpu"))
    before = {name: part.clone() for name, part in model.named_parameters()}

    held.take()
    with torch.no_grad():
        for part in model.parameters():
            part.add_(1)
    held.restore()

    changed = {n for n, part in model.named_parameters() if not torch.equal(part, before[n])}
    assert changed == {"frozen.weight", "frozen.bias"}
