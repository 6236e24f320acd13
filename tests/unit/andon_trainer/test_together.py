"""What all workers do together between two steps: means by name, the best evaluation, coverage."""

from __future__ import annotations

import itertools
import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from andon.host.manifest import checkpoint_folder, checkpoints_in, step_of
from andon_trainer import Line
from andon_trainer.line.gathering import MOST_BYTES, framed, gather_bytes, pack
from unit.andon_trainer.solo import SAMPLES, data, model, prepared


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
    """What workers exchange between two steps, with others that give what this one gives."""

    def __init__(self, line: Line, ranks: list[int]) -> None:
        self.ranks = ranks
        """Of the workers that are left."""
        self.instead: bytes | None = None
        """What the others gather instead."""
        member: Any = line._session.member
        member.scalar_all_reduce = self.reduce
        member.all_gather = self.gather

    def reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        return value, weight * len(self.ranks), len(self.ranks)

    def gather(self, data: bytes) -> tuple[bytes, ...]:
        other = data[4:] if self.instead is None else struct.pack("<I", 99) + framed([self.instead])
        return tuple(struct.pack("<I", rank) + (other if rank else data[4:]) for rank in self.ranks)


def after_a_step(line: Line) -> None:
    """Commits a step, so that the line has a roster."""
    net, optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))
    optimizer.step()


class Stream(IterableDataset[Any]):
    """The samples, in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data())


@pytest.mark.parametrize("dataset", [data(), Stream()], ids=["indices", "stream"])
def test_the_prepared_loader_is_evaluated_on_between_epochs(line: Line, dataset: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader: Any
    net, optimizer, loader = line.prepare(net, optimizer, DataLoader(dataset, 8, num_workers=1))

    for epoch in line.epochs(2):
        for x, y, _ in loader:
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
        seen = [row for _, _, rows in line.split(loader) for row in rows.tolist()]
        assert (seen, line.step) == (list(range(SAMPLES)), 3 * (epoch + 1))


def test_indices_without_a_loader_are_nothing_to_evaluate_on(line: Line) -> None:
    line.prepare(model())

    with pytest.raises(TypeError, match=r"line\.shards yields indices"):
        line.split(line.shards(SAMPLES, 8))


def test_an_evaluation_that_lost_a_worker_is_made_again_by_those_that_are_left(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    after_a_step(line)
    member: Any = line._session.member
    assigned = replace(member.position.assigned, roster=(0, 1, 2))
    member.position = replace(member.position, assigned=assigned)
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
    after_a_step(line)
    Others(line, [0, 1]).instead = pack({"numbers": {"accuracy": 1.0}, "weight": 1.0})

    with pytest.raises(ValueError, match="another worker other names"):
        line.mean({"loss": 1.0})


def test_what_is_gathered_comes_in_the_order_of_ranks_with_its_structure(line: Line) -> None:
    after_a_step(line)
    others = Others(line, [0, 1])
    others.instead = pack({"ids": torch.tensor([2**60 + 1]), "ok": [False], "loss": 0.1})

    found = line.gather({"ids": torch.tensor([5, 7]), "ok": [True], "loss": 0.25})

    assert found["ids"].tolist() == [5, 7, 2**60 + 1]
    assert (found["ok"][0].tolist(), found["loss"].tolist()) == ([True, False], [0.25, 0.1])
    assert (found["ids"].dtype, found["loss"].dtype) == (torch.int64, torch.float64)


def test_a_worker_without_samples_gathers_an_empty_tensor_of_any_dtype(line: Line) -> None:
    after_a_step(line)
    Others(line, [0, 1]).instead = pack(torch.tensor([[3, 4]]))

    assert line.gather(torch.empty(0)).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float32.*float64"),
        (torch.zeros(2, 3), torch.zeros(2, 4), r"\[2, 3\].*\[2, 4\]"),
        ([1, 2], [1], "lists of different lengths"),
        ({"a": 1}, {"b": 1}, "other names than a"),
    ],
)
def test_what_does_not_fit_together_is_not_gathered(
    line: Line, mine: Any, theirs: Any, why: str
) -> None:
    after_a_step(line)
    Others(line, [0, 1]).instead = pack(theirs)

    with pytest.raises(ValueError, match=why):
        line.gather(mine)


def test_only_numbers_and_tensors_are_gathered_and_not_too_many(line: Line) -> None:
    after_a_step(line)

    with pytest.raises(TypeError, match="not str"):
        line.gather({"name": "x"})
    with pytest.raises(ValueError, match="gather less"):
        line.gather(torch.zeros(MOST_BYTES // 4))


class Seats:
    """Workers in threads, which wait for each other in each scalar all-reduce."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers)
        self.given: dict[int, bytes] = {}
        self.calls = 0

    def seat(self, rank: int) -> Any:
        def all_gather(data: bytes) -> tuple[bytes, ...]:
            self.given[rank] = data
            self.barrier.wait(10)
            pieces = tuple(self.given[each] for each in sorted(self.given))
            self.barrier.wait(10)
            self.calls += not rank
            return pieces

        return SimpleNamespace(all_gather=all_gather)


def test_long_values_come_in_pieces_and_short_ones_wait_for_them() -> None:
    seats, given = Seats(3), [b"a" * 10_000, b"", bytes(range(256)) * 30]

    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda rank: gather_bytes(seats.seat(rank), rank, given[rank]), range(3))
        )

    assert found == [dict(enumerate(given))] * 3
    assert seats.calls == 4  # of 3 KiB each


def test_a_worker_that_gives_a_number_and_no_data_is_left_out(line: Line) -> None:
    after_a_step(line)
    member: Any = line._session.member
    member.all_gather = lambda data: (b"", data)

    assert line.gather(torch.arange(1000)).tolist() == list(range(1000))


def test_a_worker_that_is_lost_between_two_pieces_is_left_out(line: Line) -> None:
    after_a_step(line)
    others = Others(line, [0, 1])
    values = torch.arange(1000)
    whole = others.gather

    def lose(data: bytes) -> tuple[bytes, ...]:
        found = whole(data)
        others.ranks = [0]
        return found

    line._session.whole.all_gather = lose  # type: ignore[method-assign]  # no wire here

    assert torch.equal(line.gather(values), values)


def test_the_best_is_the_smallest_or_on_request_the_greatest_and_never_nan(line: Line) -> None:
    prepared(line)

    smallest = [line.best(each) for each in (2.0, math.nan, 3.0, 1.5, 1.5)]
    with Line(device="cpu") as other:
        prepared(other)
        greatest = [other.best(each, mode="max") for each in (math.nan, 0.2, 0.1, 0.3)]

    assert smallest == [True, False, False, True, False]
    assert greatest == [False, True, False, True]
    with pytest.raises(ValueError, match="mode is min or max"):
        line.best(1.0, mode="middle")  # type: ignore[arg-type]  # what a user may write


def run(line: Line, values: list[float]) -> list[bool]:
    """Trains, and takes a value as the evaluation of each epoch; which were the best."""
    net, optimizer, loader = prepared(line)
    found = []
    for epoch in line.epochs(len(values)):
        for x, y, _ in itertools.islice(loader, 2):
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
        found.append(line.best(values[epoch]))
    return found


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


def learns(line: Line) -> None:
    """Makes the line's last round one that it only attended."""
    after_a_step(line)
    member: Any = line._session.member
    assigned = replace(member.position.assigned, roster=(0, 1), rank=2, attends=True, attended=True)
    member.position = replace(member.position, assigned=assigned)


def test_a_worker_that_learns_evaluates_one_batch_and_gets_the_others_results(line: Line) -> None:
    learns(line)
    member: Any = line._session.member
    member.scalar_all_reduce = lambda _value, _weight: (7.5, 8.0, 2)
    member.all_gather = lambda _data: tuple(
        struct.pack("<I", rank)
        + struct.pack("<I", len(framed([pack([rank])])))
        + framed([pack([rank])])
        for rank in range(2)
    )

    batches = list(line.split(DataLoader(data(), 4)))
    mean = line.mean(0.5, weight=4)

    assert len(batches) == 1
    assert (mean, line.covered) == (7.5, True)
    assert [int(each) for each in line.gather([9])[0]] == [0, 1]


def test_a_worker_that_learns_is_no_main_worker_and_writes_no_checkpoint(tmp_path: Path) -> None:
    with Line(seed=3, device="cpu", run_dir=tmp_path, checkpoint_every=1) as line:
        learns(line)
        line._session.worker.between_steps()

        assert not line.is_main
        assert line.rank == line.world_size == 2
        assert checkpoints_in(tmp_path) == []
        line._session.member.position = replace(  # type: ignore[misc]  # so that it ends well
            line._session.member.position, stop_reason=""
        )
