"""A script alone: its loop, from schedulers and shards to the end of epochs and run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from andon.protocol.order import Order
from andon.protocol.records import Cursor
from andon_trainer import Line, RunOver
from unit.andon_trainer.solo import BATCH, SAMPLES, data, model, prepared


def test_a_body_without_backward_is_an_error(line: Line) -> None:
    _net, _optimizer, loader = prepared(line)
    batches = iter(loader)
    next(batches)

    with pytest.raises(RuntimeError, match=r"without line.*line\.split\(loader\)"):
        next(batches)


def test_backward_without_a_batch_is_an_error(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    for x, y, _ in itertools.islice(loader, 1):
        line.backward(F.mse_loss(net(x), y))
        optimizer.step()

        with pytest.raises(RuntimeError, match="there is none now"):
            line.backward(net(torch.zeros(1, 5)).sum())


def test_alone_only_a_short_last_batch_has_other_rows_than_the_one_before(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    seen = [line.reshaped]

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            seen.append(line.reshaped)
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()

    assert seen == [True, *[True, False, True], *[True, False, True]]


def test_a_second_prepare_is_an_error(line: Line) -> None:
    prepared(line)

    with pytest.raises(RuntimeError, match=r"already.*start the script once for each run"):
        line.prepare(model())


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_an_error(line: Line, weight: float) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(ValueError, match="weight"):
        line.backward(F.mse_loss(net(x), y), weight=weight)


def test_stop_ends_all_loops_after_the_step(line: Line) -> None:
    net, optimizer, loader = prepared(line)

    for _epoch in line.epochs(100):
        for x, y, _ in loader:
            optimizer.zero_grad()
            if line.step == 3:
                line.stop("seen enough")
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()

    assert line.step == 4
    assert line.stopped == "seen enough"
    assert line.complete


def test_shards_deal_out_indices_without_a_loader(line: Line) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = line.prepare(net, optimizer, micro_batch_size=5)
    x, y, _ = data().tensors
    dealt: list[int] = []
    steps: list[int] = []

    for _epoch in line.epochs(1):
        for shard in line.shards(SAMPLES, batch_size=BATCH):
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x[shard.indices]), y[shard.indices]))
            optimizer.step()
            dealt += shard.indices.tolist()
            steps.append(shard.step)

    assert sorted(dealt) == list(range(SAMPLES))
    assert steps == [1, 1, 2, 2, 3, 3]


def test_dropping_the_last_batch_trains_batchnorm_as_plain_pytorch_does(line: Line) -> None:
    samples = TensorDataset(*(part[:17] for part in data().tensors))  # the last batch would be one
    nets = [nn.Sequential(model(), nn.BatchNorm1d(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    net, optimizer, loader = line.prepare(
        nets[0], optimizers[0], DataLoader(samples, BATCH, shuffle=True, drop_last=True)
    )
    steps = 0

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
            steps += 1

    for epoch, start in ((0, 0), (0, 8), (1, 0), (1, 8)):
        rows = torch.from_numpy(Order(3, epoch, 17).indices(start, start + 8))
        x, y, _ = samples[rows]
        optimizers[1].zero_grad()
        F.mse_loss(nets[1](x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizers[1].step()
    assert (steps, len(loader)) == (4, 2)
    for name, theirs in nets[1].state_dict().items():
        assert torch.equal(net.state_dict()[name], theirs), name


@pytest.mark.parametrize("micro", [None, 3])
def test_a_prepared_loader_is_as_long_as_its_loop_bodies_so_progress_bars_end_at_100_percent(
    line: Line, micro: int | None
) -> None:
    net, optimizer, loader = prepared(line, micro=micro)
    bodies = 0

    for x, y, _ in loader:
        optimizer.zero_grad()
        line.backward(F.mse_loss(net(x), y))
        optimizer.step()
        bodies += 1

    # 22 samples in steps of 8, 8 and 6.
    assert (len(loader), loader.steps) == (bodies, 3)
    assert bodies == (3 if micro is None else 3 + 3 + 2)
    assert len(loader.dataset) == SAMPLES


def trained_steps(line: Line, epochs: Iterator[int], batches: Callable[[Any], Any]) -> list[int]:
    """Trains as a script does, over what `batches` makes of the loader; the epochs it saw."""
    net, optimizer, loader = prepared(line)
    seen = []
    for epoch in epochs:
        seen.append(epoch)
        for x, y, _ in batches(loader):
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("taken", "steps"), [(2, 6), (0, 0), (3, 9)], ids=["left early", "never begun", "all of it"]
)
def test_an_epoch_that_was_left_is_left(line: Line, taken: int, steps: int) -> None:
    seen = trained_steps(line, line.epochs(3), lambda loader: itertools.islice(loader, taken))

    assert seen == [0, 1, 2]
    assert line.step == steps
    assert line.complete


def test_a_batch_that_was_taken_before_the_break_is_left_too(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    first_of_epoch = []

    for _epoch in line.epochs(2):
        for number, (x, y, rows) in enumerate(loader):
            if number == 1:
                break
            first_of_epoch.append(rows.tolist())
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()

    expected = [Order(3, epoch, SAMPLES).indices(0, BATCH).tolist() for epoch in range(2)]
    assert first_of_epoch == expected
    assert line.step == 2


def test_epochs_go_on_where_the_line_is_for_a_worker_that_it_went_on_without(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    member: Any = line._session.member
    arrivals = iter([None, Cursor(3, 0), None, None])

    def be_at(cursor: Cursor | None) -> None:
        if cursor is not None:
            member.position = replace(member.position, cursor=cursor)

    def catch_up() -> None:
        be_at(next(arrivals))

    member.catch_up = catch_up
    seen = []
    for epoch in line.epochs(7):
        if epoch == 3:
            be_at(Cursor(5, 0))  # In this body, before its first batch.
        for x, y, _ in loader:
            seen.append((epoch, line.epoch))
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
            break

    assert seen == [(0, 0), (3, 5), (6, 6)]


def test_leaving_between_backward_and_step_is_an_error(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    epochs = line.epochs(2)
    next(epochs)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))

    with pytest.raises(RuntimeError, match="without optimizer"):
        next(epochs)


def test_an_epoch_of_shards_that_was_left_is_left(line: Line) -> None:
    net = model()
    net, optimizer = line.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y, _ = data().tensors
    seen = []

    for epoch in line.epochs(3):
        seen.append(epoch)
        for shard in line.shards(SAMPLES, batch_size=BATCH):
            line.backward(F.mse_loss(net(x[shard.indices]), y[shard.indices]))
            optimizer.step()
            break

    assert (seen, line.step) == ([0, 1, 2], 3)


def test_a_run_over_shards_is_resumed_in_the_epoch_of_its_checkpoint(tmp_path: Path) -> None:
    x, y, _ = data().tensors

    def epochs_seen(count: int, **options: Any) -> list[int]:
        with Line(seed=3, device="cpu", run_dir=tmp_path, checkpoint_every=100, **options) as line:
            net = model()
            net, optimizer = line.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            seen = []
            for epoch in line.epochs(count):
                seen.append(epoch)
                for shard in line.shards(SAMPLES, BATCH):
                    line.backward(F.mse_loss(net(x[shard.indices]), y[shard.indices]))
                    optimizer.step()
        return seen

    assert epochs_seen(2) == [0, 1]
    newest = tmp_path / "checkpoints/step-00000006"
    assert [epochs_seen(3, resume=newest), epochs_seen(2, resume=newest)] == [[2], []]


def test_a_loop_that_is_begun_after_the_end_raises_run_over(line: Line) -> None:
    net, optimizer, loader = prepared(line)

    def train() -> None:
        while True:
            for x, y, _ in loader:
                if line.step == 4:
                    line.stop("enough")
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()

    with pytest.raises(RunOver, match=r"the run is over: enough.*line\.epochs\(n\)") as over:
        train()
    assert over.value.exit_code == 1  # What follows the loop is lost: no success.
    assert line.step == 5
    assert list(line.epochs(1)) == []


Prepare = Callable[[Line, nn.Module, torch.optim.Optimizer], Callable[[], Any]]


def prepared_loader(**options: Any) -> Prepare:
    def prepare(line: Line, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        _, _, loader = line.prepare(net, optimizer, DataLoader(data(), **options))
        return lambda: loader

    return prepare


class Rows(IterableDataset[Any]):
    """A stream that does not say how long it is."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def prepared_stream(line: Line, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    loader: Any
    _, _, loader = line.prepare(net, optimizer, DataLoader(Rows(), BATCH, num_workers=1))
    return lambda: loader


def shards(line: Line, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    line.prepare(net, optimizer)

    class Loaded:
        def __iter__(self) -> Iterator[Any]:
            loader = line.shards(SAMPLES, BATCH)
            return (data()[shard.indices.tolist()] for shard in loader)

    return Loaded


@pytest.mark.parametrize(
    "prepare",
    [
        prepared_loader(batch_size=BATCH, shuffle=True),
        prepared_loader(batch_size=BATCH, shuffle=True, num_workers=1),
        prepared_loader(batch_size=BATCH, sampler=SubsetRandomSampler(range(SAMPLES))),
        prepared_loader(batch_sampler=[[*range(0, 9)], [*range(9, SAMPLES)]]),
        prepared_stream,
        shards,
    ],
    ids=["shuffled", "processes", "sampler", "batches", "stream", "shards"],
)
def test_after_the_last_epoch_a_loader_gives_every_sample_each_time(
    line: Line, prepare: Prepare
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = prepare(line, net, optimizer)
    for _epoch in line.epochs(2):
        for x, y, _ in loader():
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
    steps, weights = line.step, [part.clone() for part in net.parameters()]

    first = next(iter(loader()))  # A pass that is left early.
    passes = [[rows.tolist() for _, _, rows in loader()] for _ in range(2)]

    assert first[2].tolist() == passes[0][0]
    assert sorted(itertools.chain(*passes[0])) == list(range(SAMPLES))
    assert passes[0] == passes[1]
    with pytest.raises(RunOver, match=r"every epoch.*line\.split\(loader\)"):
        line.backward(F.mse_loss(net(first[0]), first[1]))
    assert (line.step, line.complete) == (steps, True)
    assert all(map(torch.equal, weights, net.parameters()))


def test_a_second_loop_over_more_epochs_goes_on_where_the_first_ended(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    seen = []

    for count in (1, 3):
        for epoch in line.epochs(count):
            for x, y, rows in loader:
                seen += [(epoch, row) for row in rows.tolist()]
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
        assert sum(len(rows) for _, _, rows in loader) == SAMPLES

    assert sorted(seen) == [(epoch, row) for epoch in range(3) for row in range(SAMPLES)]
    assert (line.step, line.complete) == (9, True)


def test_a_loader_that_outlives_its_closed_line_is_a_plain_one() -> None:
    with Line(seed=3, device="cpu") as line:
        net, optimizer, loader = prepared(line)
        for _epoch in line.epochs(1):
            for x, y, _ in loader:
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()

    assert sorted(row for _, _, rows in loader for row in rows.tolist()) == list(range(SAMPLES))


class Changing(Dataset[Any]):
    """Numbers, as many as the script wants by now."""

    def __init__(self) -> None:
        self.numbers = list(range(SAMPLES))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.numbers[index])])


class ChangingStream(IterableDataset[Any]):
    """The same as a stream that does not say how long it is."""

    def __init__(self) -> None:
        self.numbers = list(range(SAMPLES))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in self.numbers)


class SizedStream(ChangingStream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return len(self.numbers)


def train_while_it_changes(line: Line, sizes: list[int], given: DataLoader[Any]) -> list[list[int]]:
    """Trains an epoch, and one more after each change of the data; the numbers of each epoch."""
    net, dataset = nn.Linear(1, 1), cast(Any, given.dataset)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    net, optimizer, loader = line.prepare(net, optimizer, given)
    seen: list[list[int]] = []
    for epoch in line.epochs(1 + len(sizes)):
        seen.append([])
        for x in loader:
            seen[-1] += x.flatten().int().tolist()
            line.backward(net(x).mean())
            optimizer.step()
        if epoch < len(sizes):
            dataset.numbers[:] = range(sizes[epoch])
    return seen


@pytest.mark.parametrize("size", [SAMPLES + 3, SAMPLES - 3])
@pytest.mark.parametrize(
    "given",
    [
        lambda: DataLoader(Changing(), BATCH),
        lambda: DataLoader(Changing(), BATCH, shuffle=True),
        lambda: DataLoader(Changing(), BATCH, num_workers=1, persistent_workers=True),
        lambda: DataLoader(SizedStream(), BATCH),
    ],
    ids=["in order", "shuffled", "processes", "stream"],
)
def test_data_of_another_length_in_a_later_epoch_is_refused_by_name(
    line: Line, given: Callable[[], DataLoader[Any]], size: int
) -> None:
    with pytest.raises(ValueError, match=rf"is {size}, and it was {SAMPLES} .*IterableDataset"):
        train_while_it_changes(line, [size], given())
    assert (line.step, line.epoch) == (3, 1)


@pytest.mark.parametrize("size", [SAMPLES + 3, SAMPLES - 3])
@pytest.mark.parametrize("dataset", [Changing, SizedStream], ids=["indices", "stream"])
def test_after_the_last_epoch_a_data_set_of_another_length_is_given_as_it_is(
    line: Line, dataset: Callable[[], Any], size: int
) -> None:
    given = dataset()
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    net, optimizer, loader = line.prepare(net, optimizer, DataLoader(given, BATCH))
    for _epoch in line.epochs(1):
        for x in loader:
            line.backward(net(x).mean())
            optimizer.step()

    given.numbers[:] = range(size)
    passes = [[int(number) for x in loader for number in x] for _ in range(2)]

    assert passes == [list(range(size))] * 2


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_that_grows_is_followed(line: Line, processes: int) -> None:
    given = DataLoader(ChangingStream(), BATCH, num_workers=processes)

    seen = train_while_it_changes(line, [SAMPLES + 5, 4], given)

    assert [sorted(epoch) for epoch in seen] == [
        list(range(size)) for size in (SAMPLES, SAMPLES + 5, 4)
    ]


def test_a_stream_that_grows_by_more_than_is_sent_is_refused_by_name(line: Line) -> None:
    given = DataLoader(ChangingStream(), BATCH, num_workers=1)

    with pytest.raises(ValueError, match=r"numbers of the ChangingStream .*forkserver"):
        train_while_it_changes(line, [2**16], given)
    assert (line.step, line.epoch) == (3, 1)


class Curriculum(ChangingStream):
    """Every epoch has numbers of its own, more than are sent."""

    def set_epoch(self, epoch: int) -> None:
        self.numbers = [epoch, *[1] * 7]
        self.pool = list(range(2**16))


def test_what_set_epoch_makes_anew_is_no_change_of_the_script_s(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    given = DataLoader(Curriculum(), BATCH, num_workers=1)

    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    net, optimizer, loader = line.prepare(net, optimizer, given)
    firsts = []
    for _epoch in line.epochs(3):
        for x in loader:
            firsts.append(x[0].item())
            line.backward(net(x).mean())
            optimizer.step()

    assert firsts == [0, 1, 2]
    assert "has changed since line.prepare" not in caplog.text


def test_a_sampler_of_a_fixed_number_draws_from_data_that_grows(line: Line) -> None:
    dataset = Changing()
    sampler = RandomSampler(dataset, replacement=True, num_samples=40)

    seen = train_while_it_changes(line, [200], DataLoader(dataset, BATCH, sampler=sampler))

    assert [len(epoch) for epoch in seen] == [40, 40]
    assert max(seen[0]) < SAMPLES <= max(seen[1])


def test_other_numbers_for_shards_are_refused_by_name(line: Line) -> None:
    net = model()
    net, optimizer = line.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y, _ = data().tensors

    def train(epochs: int, samples: int, batch_size: int) -> None:
        for _epoch in line.epochs(epochs):
            for shard in line.shards(samples, batch_size):
                line.backward(F.mse_loss(net(x[shard.indices]), y[shard.indices]))
                optimizer.step()

    train(1, 16, 8)
    for samples, batch_size in ((SAMPLES, 8), (16, 4)):
        with pytest.raises(ValueError, match=r"it was \(16, batch_size=8\) before"):
            train(2, samples, batch_size)
    assert line.step == 2


BATCHES = [[3, 1, 4, 15, 9, 2, 6], [5, 8], [0], [7, 10, 11, 12]]


@pytest.mark.parametrize("micro", [None, 3])
def test_f_dp_005_each_batch_of_a_batch_sampler_is_a_step_of_its_own_samples(
    line: Line, micro: int | None
) -> None:
    nets = [model(), model()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    given = DataLoader(data(), batch_sampler=BATCHES)
    net, optimizer, loader = line.prepare(nets[0], optimizers[0], given, micro_batch_size=micro)
    bodies, seen = 0, []

    for x, y, _ in loader:
        optimizer.zero_grad()
        line.backward(F.mse_loss(net(x), y), correct=len(x))
        optimizer.step()
        bodies += 1
        if line.committed:
            seen.append((line.loss, line.accuracy))

    losses = []
    for batch in BATCHES:
        x, y, _ = data()[batch]
        optimizers[1].zero_grad()
        loss = F.mse_loss(nets[1](x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizers[1].step()
        losses.append(loss.item())
    assert [loss for loss, _ in seen] == pytest.approx(losses, rel=1e-5)
    assert [accuracy for _, accuracy in seen] == [1.0] * 4
    assert (len(loader), loader.steps, loader.batch_size) == (bodies, 4, None)
    assert bodies == (4 if micro is None else 3 + 1 + 1 + 2)
