"""A snapshot: the state of the moment at which it was cut, whatever becomes of it afterwards."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from andon.host.manifest import CheckpointFacts
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.run_settings import RunPlan
from andon.protocol.schedules import OuterOptimizer
from andon_trainer.state.checkpoint_files import Draft
from andon_trainer.state.replica import CheckpointCut, Replica
from andon_trainer.state.snapshot import LARGE_BYTES, CopyRooms, Snapshot, large_bytes_of
from unit.andon_trainer.local_bench import LocalBench

WIDTH = 600
"""Its square is large, as floats."""


class Trained:
    """A replica with large and small tensors, after one step."""

    def __init__(self, *, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.replica = Replica([self.model], [self.optimizer])
        assert self.weight.nbytes > LARGE_BYTES
        self.backward()
        self.optimizer.step()
        self.backward()

    @property
    def weight(self) -> nn.Parameter:
        weight = self.model[0].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).square().mean().backward()

    def facts(self, *, digest: bool = True) -> CheckpointFacts:
        return CheckpointFacts(
            head=Key(1, 2),
            step=2,
            cursor=Cursor(0, 8),
            digest=self.replica.digest().hex() if digest else "",
            plan=RunPlan(global_batch=8, seed=1),
        )

    def cut(self, folder: Path) -> CheckpointCut:
        facts = self.facts(digest=False)
        return self.replica.cut(folder, facts, {"now": 1})


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_that_is_cut_has_the_bytes_of_one_that_was_written_at_rest(
    tmp_path: Path, *, fused: bool
) -> None:
    trained = Trained(fused=fused)
    rooms = trained.replica.rooms
    trained.replica.save(tmp_path / "rest", trained.facts(), {"now": 1})
    steps = threading.Thread(target=trained.optimizer.step)

    cut = trained.cut(tmp_path / "beside")
    trained.backward()  # Moves buffers, too.
    steps.start()
    steps.join(0.05)
    waits = steps.is_alive()
    whole = cut.write()
    steps.join()
    cut.snapshot.close()

    assert waits, "an optimizer must not write what is not copied yet"
    assert whole
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "rest")
    assert [each.name for each in tmp_path.glob(".*")] == []
    room = rooms.lend()
    before = room.get(1).data_ptr()
    rooms.give_back(room)
    again = trained.cut(tmp_path / "again")
    assert again.write()
    again.snapshot.close()
    assert rooms.lend().get(1).data_ptr() == before, "its memory is used again"
    assert files_of(tmp_path / "again") != files_of(tmp_path / "rest")


def scaled(trained: Trained) -> None:
    with torch.no_grad():
        trained.weight.mul_(2)


def moved(trained: Trained) -> None:
    trained.weight.data = torch.zeros(WIDTH, WIDTH)


def reloaded(trained: Trained) -> None:
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    for state in trained.optimizer.state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        (scaled, False),
        (lambda trained: trained.weight.data.mul_(2), False),  # Torch counts no write here.
        (lambda trained: trained.optimizer.state[trained.weight]["exp_avg"].mul_(2), False),
        (lambda trained: trained.model[0].bias.data.mul_(2), True),  # Small: copied at the cut.
        (lambda trained: trained.model[1].running_mean.mul_(2), True),
        (moved, True),  # What was there at the cut is still there.
        (reloaded, True),
    ],
    ids=["in place", "by data", "a moment", "small", "a buffer", "other memory", "other moments"],
)
def test_a_snapshot_is_of_its_moment_or_there_is_no_checkpoint(
    tmp_path: Path, change: Callable[[Trained], None], *, whole: bool
) -> None:
    trained = Trained()
    trained.replica.save(tmp_path / "rest", trained.facts(), {"now": 1})
    cut = trained.cut(tmp_path / "beside")

    change(trained)
    written = cut.write()
    cut.snapshot.close()

    assert written is whole
    assert (tmp_path / "beside").exists() is whole
    assert list(tmp_path.glob(".*")) == []
    if whole:
        assert files_of(tmp_path / "beside") == files_of(tmp_path / "rest")


@pytest.mark.parametrize("overlap", [False, True])
def test_local_steps_wait_for_what_was_cut_between_two_windows(*, overlap: bool) -> None:
    outer = OuterOptimizer(learning_rate=0.7, momentum=0.9)
    bench = LocalBench(outer=outer, overlap=overlap)
    bench.replica.use_outer(bench.outer)
    cuts: list[tuple[Snapshot, dict[str, Any], threading.Thread]] = []

    def cut() -> None:
        assigned = bench.member.position.assigned
        if assigned is not None and assigned.ahead_batch is not None:
            return  # What is computed ahead is in the weights: no checkpoint is cut here.
        tree = {
            "model": dict(bench.model.state_dict(keep_vars=True)),
            "optimizer": bench.optimizer.state_dict(),
            "outer": bench.outer.state_dict(),
        }
        # All is late: what is small, too.
        late = bench.replica.written_by_steps()
        snapshot = Snapshot(tree, late, rooms=CopyRooms(), large_bytes=0)
        thread = threading.Thread(target=snapshot.complete)
        cuts.append((snapshot, copy.deepcopy(tree), thread))
        thread.start()

    bench.cut = cut
    batch = PositionRange(8, 16)
    ahead: dict[str, Any] = {"ahead": (batch,), "ahead_batch": batch} if overlap else {}
    bench.assign((0, 8), end="commit", **ahead)
    bench.assign((8, 16), end="commit", batch=batch)
    bench.assign((16, 24), end="commit")
    bench.run()

    assert len(cuts) == 3 if overlap else 4
    for snapshot, plain, thread in cuts:
        thread.join()
        assert snapshot.complete(), "nothing but optimizers wrote"
        snapshot.close()
        assert equal(snapshot.tree, plain)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_what_a_tree_holds_twice_is_copied_once_and_odd_tensors_as_they_are_packed() -> None:
    shared = torch.arange(LARGE_BYTES, dtype=torch.int32)
    odd = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
    }
    tree = {"one": shared, "two": [shared], "odd": odd, "plain": (1, "a", None)}
    plain = copy.deepcopy(tree)

    snapshot = Snapshot(tree, {id(each) for each in odd.values()}, rooms=CopyRooms(), large_bytes=8)
    assert snapshot.complete()
    snapshot.close()
    shared.zero_()

    assert equal(snapshot.tree, plain)
    assert snapshot.tree["one"] is snapshot.tree["two"][0]
    assert large_bytes_of(tree) == 4 * LARGE_BYTES


def test_a_writers_draft_stays_while_it_lives_and_goes_when_it_is_dead(tmp_path: Path) -> None:
    trained = Trained()
    live = trained.cut(tmp_path / "step-00000002")  # The line has lost this worker.
    (tmp_path / ".step-00000001.0123abcd").mkdir()

    trained.replica.save(tmp_path / "step-00000003", trained.facts())
    left = [each.name for each in tmp_path.glob(".*")]

    assert len(left) == 1
    assert left[0].startswith(".step-00000002.")
    assert live.write()
    assert {each.name for each in tmp_path.iterdir()} == {"step-00000002", "step-00000003"}


def test_what_fails_beside_training_lets_optimizers_go_on(tmp_path: Path) -> None:
    trained = Trained()
    cut = trained.cut(tmp_path / "gone")
    for draft in tmp_path.glob(".*"):
        shutil.rmtree(draft)

    with pytest.raises(FileNotFoundError):
        cut.write()
    trained.optimizer.step()

    assert list(tmp_path.iterdir()) == []
    Draft(tmp_path / "gone").discard()
    assert list(tmp_path.iterdir()) == []
