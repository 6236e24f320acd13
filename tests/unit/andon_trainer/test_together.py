"""What all workers do together between two steps: means by name, the best evaluation, coverage."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from andon.host.manifest import checkpoint_folder, checkpoints_in, step_of
from andon_trainer import Line
from unit.andon_trainer.solo import data, prepared


def test_a_mean_of_several_numbers_keeps_their_names_and_order(line: Line) -> None:
    prepared(line)

    found = line.mean({"loss": torch.tensor(2.5), "accuracy": 1}, weight=3)

    assert list(found.items()) == [("loss", 2.5), ("accuracy", 1.0)]
    assert math.isnan(line.mean({"loss": 1.0}, weight=0)["loss"])
    assert line.mean({}) == {}


def test_a_mean_or_a_best_in_the_middle_of_a_step_is_an_error(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))

    with pytest.raises(RuntimeError, match=r"line\.mean is taken between two steps"):
        line.mean(1.0)
    with pytest.raises(RuntimeError, match=r"line\.best is taken between two steps"):
        line.best(1.0)


class Others:
    """Scalar all-reduces together with workers that are lost one by one."""

    def __init__(self, line: Line, ranks: list[int]) -> None:
        self.ranks = ranks
        """Of the workers that are left, this one's first."""
        self.names = 0.0
        line._member.scalar_all_reduce = self.reduce  # type: ignore[method-assign]  # no wire here

    def reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        if value == 1.0 and weight == 1.0:  # The bit of rank 0: the others have theirs.
            return sum(1 << rank for rank in self.ranks) / len(self.ranks), len(self.ranks), 1
        return value + self.names, weight * len(self.ranks), len(self.ranks)


def test_an_evaluation_that_lost_a_worker_is_made_again_by_those_that_are_left(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))
    optimizer.step()
    monkeypatch.setattr(Line, "world_size", 3)
    others = Others(line, [0, 1, 2])

    def evaluate() -> list[int]:
        seen = [int(row) for _x, _y, rows in line.split(DataLoader(data(), 4)) for row in rows]
        line.mean(0.5, weight=len(seen))
        return seen

    whole, covered = evaluate(), line.covered
    others.ranks = [0, 2]
    less, lost = evaluate(), line.covered
    again, covered_again = evaluate(), line.covered

    assert (whole, covered) == (list(range(8)), True)
    assert (less, lost) == (list(range(8)), False)
    assert (again, covered_again) == (list(range(11)), True)
    assert "those of rank 1" in caplog.text


def test_workers_that_give_other_names_learn_of_it(line: Line) -> None:
    prepared(line)
    Others(line, [0, 1]).names = 0.5

    with pytest.raises(ValueError, match="another worker other names"):
        line.mean({"loss": 1.0})


def test_the_best_is_the_smallest_or_the_greatest_and_never_nan(line: Line) -> None:
    prepared(line)

    assert [line.best(each) for each in (2.0, math.nan, 3.0, 1.5, 1.5)] == [
        True, False, False, True, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="mode is min or max"):
        line.best(1.0, mode="middle")  # type: ignore[arg-type]  # what a user may write


def test_the_greatest_is_the_best_on_request(line: Line) -> None:
    prepared(line)

    assert [line.best(each, mode="max") for each in (math.nan, 0.2, 0.1, 0.3)] == [
        False, True, False, True,
    ]  # fmt: skip


def run(line: Line, values: list[float], *, patience: int | None = None) -> list[bool]:
    """Trains, and takes a value as the evaluation of each epoch; which were the best."""
    net, optimizer, loader = prepared(line)
    found = []
    for epoch in line.epochs(len(values)):
        for x, y, _ in itertools.islice(loader, 2):
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
        found.append(line.best(values[epoch], patience=patience))
    return found


def test_patience_stops_the_run() -> None:
    with Line(device="cpu") as line:
        found = run(line, [3.0, 2.0, 4.0, 5.0, 1.0, 0.0], patience=2)

        assert found == [True, True, False, False, True][: len(found)]
        assert line.stopped == "2 evaluations without a better one"
        assert line.step == 9


def test_the_best_checkpoint_is_kept_and_goes_on_from_there(tmp_path: Path) -> None:
    with Line(seed=3, device="cpu", run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=1) as a:
        run(a, [3.0, 1.0, 4.0, 5.0])

    best = tmp_path / "checkpoints" / "best"
    assert [step_of(each) for each in checkpoints_in(tmp_path)] == [8, 6, 4]
    assert best.resolve() == checkpoint_folder(tmp_path, 4)
    with Line(seed=3, device="cpu", run_dir=tmp_path / "again", resume=best) as again:
        assert run(again, [9.0, 9.0, 2.0, 0.5]) == [False, True]


def test_the_best_is_written_though_no_checkpoint_was_due(tmp_path: Path) -> None:
    with Line(seed=3, device="cpu", run_dir=tmp_path) as line:
        run(line, [3.0, 1.0, 4.0])

    assert [step_of(each) for each in checkpoints_in(tmp_path)] == [4, 2]
    assert (tmp_path / "checkpoints" / "best").resolve() == checkpoint_folder(tmp_path, 4)
