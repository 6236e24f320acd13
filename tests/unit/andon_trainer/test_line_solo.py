from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.order import Order
from andon_trainer import Line, LineHalted, RunOver
from andon_trainer.config import LineConfig

SAMPLES, BATCH = 22, 8


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(seed=3, device="cpu")
    yield line
    line.close()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def prepared(
    line: Line, *, micro: int | None = None, lr: float = 0.1
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    return line.prepare(net, optimizer, loader, micro_batch_size=micro)  # type: ignore[no-any-return]  # prepare gives back what it takes


def plain_losses(epochs: int) -> tuple[list[float], nn.Module]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y, _ = data().tensors
    losses = []
    for epoch in range(epochs):
        order = Order(3, epoch, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            rows = torch.from_numpy(order.indices(start, min(start + BATCH, SAMPLES)))
            optimizer.zero_grad()
            loss = F.mse_loss(net(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            losses.append(loss.item())
    return losses, net


def test_a_loop_of_five_changed_lines_trains_as_plain_pytorch_does(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    losses = []

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
            losses.append(line.loss)

    expected, expected_net = plain_losses(2)
    assert losses == expected
    assert line.complete
    assert line.step == 6
    for ours, theirs in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_model_got_right_is_counted_over_micro_batches(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    accuracies: list[float | None] = []
    assert line.accuracy is None

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y), correct=torch.tensor(len(x) - 1))
            optimizer.step()
            if line.committed:
                accuracies.append(line.accuracy)

    assert accuracies == [5 / 8, 5 / 8, 4 / 6], "one wrong in each micro-batch of 3, 3 and 2"


def test_a_step_of_which_a_micro_batch_was_not_counted_has_no_accuracy(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)

    for body, (x, y, _) in enumerate(islice(loader, 3)):
        line.backward(F.mse_loss(net(x), y), correct=None if body == 1 else 1)
        optimizer.step()

    assert (line.step, line.accuracy) == (1, None)


@pytest.mark.parametrize("correct", [-1, BATCH + 1])
def test_more_right_samples_than_there_are_are_refused(line: Line, correct: int) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(ValueError, match=f"this batch has {BATCH}: not {correct}"):
        line.backward(F.mse_loss(net(x), y), correct=correct)


def test_a_scaled_loss_is_reported_as_it_was(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer, loader = prepared(line)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            losses.append(line.loss)

    # A power of two scales without rounding.
    expected, expected_net = plain_losses(2)
    assert losses == expected
    for ours, theirs in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not caplog.records


def test_a_loss_that_the_script_scaled_is_warned_of_once(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    for x, y, _ in islice(loader, 2):
        optimizer.zero_grad()
        line.backward(scaler.scale(F.mse_loss(net(x), y)))
        scaler.step(optimizer)
        scaler.update()

    (record,) = caplog.records
    assert "scaled by 1024" in record.getMessage()
    assert "line.backward(loss, scaler=scaler)" in record.getMessage()


def test_micro_batches_make_the_same_step_and_move_weights_once(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    bodies, moves = 0, 0

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            bodies += 1
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            before = line.step
            optimizer.step()
            moves += line.step - before

    _, expected = plain_losses(2)
    assert (bodies, moves) == (2 * (3 + 3 + 2), 6)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clipping_in_every_loop_body_sees_the_complete_gradient_only(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    norms = []

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.01)))
            optimizer.step()

    assert [norm > 0 for norm in norms] == [False, False, True] * 2 + [False, True]


def test_weights_follow_the_given_weight(line: Line) -> None:
    net, _optimizer, loader = prepared(line, micro=4)
    x, y, _ = data().tensors
    order = Order(3, 0, SAMPLES)
    first = torch.from_numpy(order.indices(0, 4))
    second = torch.from_numpy(order.indices(4, 8))
    twin = model()
    halves = F.mse_loss(twin(x[first]), y[first]), F.mse_loss(twin(x[second]), y[second])
    (0.25 * halves[0] + 0.75 * halves[1]).backward()  # type: ignore[no-untyped-call]  # torch's own

    batches = iter(loader)
    for weight in (1.0, 3.0):
        x_part, y_part, _ = next(batches)
        line.backward(F.mse_loss(net(x_part), y_part), weight=weight)

    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_f_dp_003_a_nan_gradient_halts_before_the_weights_move(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    weight = net.get_parameter("2.weight")
    before = [parameter.detach().clone() for parameter in net.parameters()]

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 4] = float("nan")
        return gradient

    weight.register_hook(plant)  # type: ignore[no-untyped-call]  # torch's own
    x, y, _ = next(iter(loader))
    with pytest.raises(LineHalted) as caught:
        line.backward(F.mse_loss(net(x), y))

    optimizer.step()
    halt = caught.value
    assert (halt.reason, halt.worker, halt.step) == ("non_finite_gradient", 0, 1)
    assert (halt.parameter, halt.element, halt.value) == ("2.weight", (0, 4), "nan")
    assert line.step == 0
    for now, then in zip(net.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("without", [{0}, {1}, {3}, {0, 1, 3}, {0, 1, 2, 3}])
def test_a_nan_loss_of_weight_0_halts_nobody_and_adds_nothing(
    line: Line, without: set[int]
) -> None:
    net, optimizer, loader = prepared(line, micro=2)
    twin = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    weight = 2.0 * len({0, 1, 2, 3} - without)

    for number, (x, y, _) in enumerate(islice(loader, 4)):
        optimizer.zero_grad()
        counted = y[:0] if number in without else y  # the mean over no target is NaN
        line.backward(F.mse_loss(net(x)[: len(counted)], counted), weight=len(counted))
        if len(counted):
            (F.mse_loss(twin(x), y) * 2 / weight).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    assert line.step == 1
    for ours, theirs, start in zip(net.parameters(), twin.parameters(), before, strict=True):
        moved = torch.zeros_like(start) if theirs.grad is None else 0.1 * theirs.grad
        assert torch.allclose(start - ours, moved, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_a_sum_is_warned_of_once_and_one_with_a_weight_never(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)

    for step, (x, y, _) in enumerate(loader):
        loss = F.mse_loss(net(x), y, reduction="sum")
        line.backward(loss, weight=1.0 if step == 0 else None)
        assert len(caplog.messages) == min(step, 1)
        optimizer.step()


def test_a_model_that_was_moved_after_prepare_is_an_error_that_says_what_to_leave_out(
    line: Line,
) -> None:
    net, _optimizer, loader = prepared(line)

    net.to("meta")

    with pytest.raises(RuntimeError, match=r"leave model\.cuda\(\) and model\.to"):
        next(iter(loader))


class Wrapped(nn.parallel.DistributedDataParallel):
    """As a script makes one, without the process group that it takes."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (lambda: [Wrapped(model())], r"leave Wrapped\(\.\.\.\) out"),
        (lambda: [nn.Sequential(nn.DataParallel(model()))], r"leave DataParallel\(\.\.\.\) out"),
        (
            lambda: [model(), DataLoader(data(), BATCH), DataLoader(data(), BATCH)],
            r"iterate line\.split\(loader\) where you evaluate",
        ),
        (lambda: [model(), data()], "not Sequential, TensorDataset"),
    ],
    ids=["DDP", "DataParallel inside", "two loaders", "a dataset"],
)
def test_what_prepare_does_not_take_is_refused_with_what_to_write(
    line: Line, objects: Callable[[], list[Any]], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        line.prepare(*objects())


def test_f_dp_003_a_nan_loss_halts(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(LineHalted, match="loss") as caught:
        line.backward(F.mse_loss(net(x), y) * float("inf"))

    assert caught.value.reason == "non_finite_loss"
    assert caught.value.value == "inf"


def test_a_scheduler_moves_only_on_commits(line: Line) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    net, optimizer, scheduler, loader = line.prepare(
        net, optimizer, scheduler, loader, micro_batch_size=2
    )

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            line.backward(F.mse_loss(net(x), y) * 0)
            optimizer.step()
            scheduler.step()

    assert optimizer.param_groups[0]["lr"] == 0.5**3


def test_a_scheduler_that_was_not_prepared_is_an_error(line: Line) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    line.prepare(net, optimizer, DataLoader(data(), BATCH))

    with pytest.raises(RuntimeError, match="not prepared"):
        scheduler.step()


def test_a_body_without_backward_is_an_error(line: Line) -> None:
    _net, _optimizer, loader = prepared(line)
    batches = iter(loader)
    next(batches)

    with pytest.raises(RuntimeError, match="without line"):
        next(batches)


def test_a_body_without_a_step_is_an_error(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    batches = iter(loader)
    x, y, _ = next(batches)
    line.backward(F.mse_loss(net(x), y))

    with pytest.raises(RuntimeError, match="without optimizer"):
        next(batches)


def test_backward_without_a_batch_is_an_error(line: Line) -> None:
    net, _optimizer, _loader = prepared(line)

    with pytest.raises(RuntimeError, match="there is none now"):
        line.backward(net(torch.zeros(1, 5)).sum())


def test_a_second_prepare_is_an_error(line: Line) -> None:
    prepared(line)

    with pytest.raises(RuntimeError, match="already"):
        line.prepare(model())


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_an_error(line: Line, weight: float) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(ValueError, match="weight"):
        line.backward(F.mse_loss(net(x), y), weight=weight)


def test_a_total_weight_of_zero_commits_and_moves_nothing(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    x, y, _ = next(iter(loader))

    line.backward(F.mse_loss(net(x), y), weight=0)
    optimizer.step()

    assert line.committed
    assert line.step == 1
    for now, then in zip(net.parameters(), before, strict=True):
        assert torch.equal(now, then)


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


def test_a_prepared_loader_has_its_dataset_and_says_what_to_write_for_what_it_lacks(
    line: Line,
) -> None:
    _net, _optimizer, loader = prepared(line)

    assert len(loader.dataset) == SAMPLES
    with pytest.raises(AttributeError, match=r"leave sampler\.set_epoch\(epoch\) out"):
        loader.sampler.set_epoch(1)
    with pytest.raises(AttributeError, match="no num_workers"):
        _ = loader.num_workers


def test_split_and_mean_see_every_sample_once(line: Line) -> None:
    prepared(line)

    seen = [
        int(index) for _x, _y, indices in line.split(DataLoader(data(), 4)) for index in indices
    ]

    assert seen == list(range(SAMPLES))
    assert line.mean(2.5, weight=7) == 2.5


def test_arguments_beat_the_environment_and_a_bad_number_is_named() -> None:
    found = LineConfig.read({"ANDON_ADDRESS": "a:1", "RANK": "2"}, address="b:2")

    assert (found.address, found.launch_slot, found.solo) == ("b:2", 2, False)
    with pytest.raises(ValueError, match="RANK must be a whole number"):
        LineConfig.read({"RANK": "two"})
    with pytest.raises(ValueError, match="on_halt"):
        LineConfig.read({"ANDON_ON_HALT": "ignore"})


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_processes_that_know_of_no_line_are_refused_with_what_to_set(name: str) -> None:
    alone = LineConfig.read({name: "1"})
    addressed = LineConfig.read({name: "4", "ANDON_ADDRESS": "a:1"})

    assert (alone.solo, addressed.solo) == (True, False)
    with pytest.raises(ValueError, match=f"{name} is 4.* would train alone.*andon run --workers 4"):
        LineConfig.read({name: "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


def test_torchrun_is_found_by_its_variables_unless_there_is_an_address() -> None:
    env = {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    under = LineConfig.read(env)
    addressed = LineConfig.read({**env, "ANDON_ADDRESS": "a:1"})

    assert under.torchrun is not None
    assert (under.torchrun.rank, under.torchrun.hosted_by_agent, under.solo) == (1, True, False)
    assert addressed.torchrun is None


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


def test_a_loop_that_is_begun_after_the_end_raises_run_over(line: Line) -> None:
    net, optimizer, loader = prepared(line)

    def train() -> None:
        while True:
            for x, y, _ in loader:
                if line.step == 4:
                    line.stop("enough")
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()

    with pytest.raises(RunOver, match=r"the run is over: enough.*line\.epochs\(n\)"):
        train()
    assert line.step == 5
    assert list(line.epochs(1)) == []


def test_a_loop_after_the_last_epoch_raises_run_over(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()

    with pytest.raises(RunOver, match="every epoch"):
        next(iter(loader))
