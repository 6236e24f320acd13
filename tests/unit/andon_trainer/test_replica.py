from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from andon_trainer.model.layout import plan_model
from andon_trainer.script.gates import Audit, StepIdentity, gate_optimizer, gate_scheduler
from andon_trainer.state import replica as module
from andon_trainer.state import snapshot
from andon_trainer.state.replica import Replica
from andon_trainer.state.snapshot import CopyRooms


class Open:
    """A keeper whose every step is committed."""

    committed = True
    identity = StepIdentity(0, 0, 1)
    moves = 0
    learning_rate_scale = 1.0
    plan_steps: range | None = None

    def try_commit(self) -> bool:
        self.identity = self.identity._replace(commits=self.identity.commits + 1)
        self.moves += 1
        return True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def trained(seed: int, steps: int) -> tuple[Replica, LRScheduler]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    audit = Audit([model], [optimizer])
    audit.open(plan_model([model]))
    audit.close()
    gate_optimizer(optimizer, Open(), audit)
    gate_scheduler(scheduler, Open())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    replica = Replica([model], [optimizer])
    replica.register("scheduler.0", scheduler)
    return replica, scheduler


def next_digest(replica: Replica) -> bytes:
    """The weights after one more step on the same samples: moments and rates count in it."""
    torch.manual_seed(9)
    optimizer = replica.optimizers[0]
    optimizer.zero_grad()
    replica.modules[0](torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    return replica.digest()


def test_a_newcomer_that_installs_a_state_makes_the_same_next_step() -> None:
    (old, scheduler), (newcomer, its_scheduler) = trained(1, steps=4), trained(2, steps=0)

    newcomer.install(bytes(old.packed()))

    assert newcomer.digest() == old.digest()
    assert its_scheduler.state_dict() == scheduler.state_dict()
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert next_digest(newcomer) == next_digest(old)


def test_a_state_may_come_before_the_script_registers_what_it_is_of() -> None:
    (old, _), (newcomer, _) = trained(1, steps=1), trained(2, steps=0)
    old.register("average", nn.Linear(1, 1))
    average = nn.Linear(1, 1)

    newcomer.install(bytes(old.packed()))
    newcomer.register("average", average)

    theirs = old.registered["average"].state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in average.state_dict().items())


def test_a_state_with_another_number_of_optimizers_changes_nothing() -> None:
    (old, _), (newcomer, _) = trained(1, steps=1), trained(2, steps=0)
    old.optimizers = [*old.optimizers, *old.optimizers]
    before = newcomer.digest()

    with pytest.raises(ValueError, match="2 optimizers, this script 1"):
        newcomer.install(bytes(old.packed()))

    assert newcomer.digest() == before


def test_a_name_is_registered_once() -> None:
    replica, scheduler = trained(1, steps=0)

    with pytest.raises(ValueError, match=r"'scheduler\.0' is registered already"):
        replica.register("scheduler.0", scheduler)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"seen": {1, 2}}, r"seen is a set: state_dict\(\) may hold"),
        ({"counts": torch.ones(2).to_sparse()}, "counts is a .*sparse"),
        ({"shadow": {"w": object()}}, r"shadow\.w is a object"),
    ],
    ids=["set", "sparse", "object"],
)
def test_what_can_not_be_kept_is_refused_where_it_is_registered(
    state: dict[str, Any], why: str
) -> None:
    replica, scheduler = trained(1, steps=0)
    scheduler.state_dict = lambda: state  # type: ignore[method-assign]  # any state

    with pytest.raises(TypeError, match=f"the state of 'average' can't go .*{why}"):
        replica.register("average", scheduler)


def large(steps: int = 2) -> Replica:
    """A model whose first layer is copied beside training, and whose last one is frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 2))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[:2].parameters(), lr=0.1)
    replica = Replica([model], [optimizer])
    replica.mark(plan_model([model]))
    for _ in range(steps):
        step(replica)
    return replica


def step(replica: Replica) -> None:
    model, optimizer = replica.modules[0], replica.optimizers[0]
    optimizer.zero_grad()
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()


def test_a_cut_state_is_that_of_the_moment_however_training_goes_on() -> None:
    replica = large()
    expected = bytes(replica.packed())

    cut = replica.cut_state()
    # Forward writes the running statistics; the optimizer's step would wait for the copies.
    replica.modules[0](torch.randn(4, 512))
    whole = cut.complete()
    step(replica)
    state = bytes(cut.packed())
    cut.close()

    assert whole
    assert state == expected
    assert bytes(replica.packed()) != expected


def test_a_cut_state_is_torn_if_the_script_writes_weights_before_they_are_copied() -> None:
    replica = large()

    cut = replica.cut_state()
    with torch.no_grad():
        next(replica.modules[0].parameters()).mul_(2.0)
    whole = cut.complete()
    cut.close()

    assert not whole


@pytest.mark.parametrize("got", [True, False])
def test_a_state_is_copied_into_memory_that_was_got_ahead(
    monkeypatch: pytest.MonkeyPatch, *, got: bool
) -> None:
    monkeypatch.setattr(module, "_WORTH_GETTING_BYTES", 2**20)
    replica = large()
    expected = bytes(replica.packed())
    get = replica.room_ahead()
    assert get is not None
    ahead = threading.Thread(target=get)  # It is never of this thread's priority again.
    if got:
        ahead.start()
        ahead.join()
        room = replica.rooms.lend()
        memory = room.get(1).data_ptr()
        replica.rooms.give_back(room)

    cut = replica.cut_state()
    assert cut.complete()

    assert bytes(cut.packed()) == expected
    if got:
        place = cut.snapshot.tree["model"]["0.weight"].data_ptr()
        assert memory <= place < memory + cut.snapshot.large_bytes
    else:
        ahead.start()  # It comes too late, and touches nothing that is read.
        ahead.join()
        assert bytes(cut.packed()) == expected
    cut.close()


@pytest.mark.parametrize(("part", "keeps"), [(8, True), (7, False)])
def test_memory_for_copies_is_got_ahead_and_kept_only_where_there_is_plenty(
    monkeypatch: pytest.MonkeyPatch, part: int, *, keeps: bool
) -> None:
    monkeypatch.setattr(module, "_WORTH_GETTING_BYTES", 2**20)
    replica = large()
    cut = replica.cut_state()
    room = cut.snapshot._room
    monkeypatch.setattr(snapshot, "available_bytes", lambda: part * cut.snapshot.large_bytes)

    ahead = replica.room_ahead()
    cut.close()

    assert (ahead is not None) == keeps
    assert (replica.rooms.lend() is room) == keeps


def test_no_memory_is_got_for_a_small_state() -> None:
    assert large().room_ahead() is None


def test_a_second_copy_at_a_time_has_a_room_of_its_own() -> None:
    rooms = CopyRooms()
    first, second = rooms.lend(), rooms.lend()
    assert first is not second

    rooms.give_back(second)
    rooms.give_back(first)
    assert rooms.lend() is second

    rooms.give_back(second)
    rooms.let_go()
    assert rooms.lend() not in (first, second)
