"""Accumulation: several committed batches make one step of the optimizer, as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from andon.host.manifest import checkpoint_folder
from andon.protocol.order import Order
from andon.protocol.records import PositionRange
from andon_trainer import Line
from unit.andon_trainer.solo import BATCH, SAMPLES, data, model, prepared
from unit.andon_trainer.step_bench import StepBench

EPOCHS = 2


def train(
    line: Line, every: int, *, micro: int | None = None, epochs: int = EPOCHS, clip: float = 1e9
) -> tuple[nn.Module, list[tuple[int, bool, bool]]]:
    """Trains; of each loop body the step, whether it had gradients, and whether weights moved."""
    net, optimizer, loader = prepared(line, micro=micro)
    bodies = []
    for _epoch in line.epochs(epochs):
        for x, y, _ in loader:
            with line.accumulate(every):
                optimizer.zero_grad()
                line.backward(F.mse_loss(net(x), y))
                there = all(part.grad is not None for part in net.parameters())
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
            bodies.append((line.step, there, line.committed))
    return net, bodies


def plain(groups: Sequence[tuple[int, int, int]], *, clip: float = 1e9) -> nn.Module:
    """What plain PyTorch makes of (epoch, start, stop), one step each."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y, _ = data().tensors
    for epoch, start, stop in groups:
        rows = torch.from_numpy(Order(3, epoch, SAMPLES).indices(start, stop))
        optimizer.zero_grad()
        F.mse_loss(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]  # torch's own
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


PAIRS = [(epoch, *bounds) for epoch in range(EPOCHS) for bounds in ((0, 16), (16, 22))]


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro", [None, 3])
def test_f_dp_005_two_batches_and_a_rest_are_steps_on_their_union(
    line: Line, micro: int | None
) -> None:
    net, bodies = train(line, 2, micro=micro)

    assert_same(net, plain(PAIRS))
    assert line.step == 6
    assert sum(moved for _, _, moved in bodies) == 4


def test_only_the_last_batch_has_gradients_and_clipping_sees_the_whole_mean(line: Line) -> None:
    net, bodies = train(line, 2, clip=0.05)

    assert bodies[:3] == [(1, False, False), (2, True, True), (3, True, True)]
    assert_same(net, plain(PAIRS, clip=0.05))


def test_accumulating_one_batch_changes_nothing(line: Line) -> None:
    net, bodies = train(line, 1)

    steps = [
        (epoch, start, min(start + BATCH, SAMPLES)) for epoch in (0, 1) for start in (0, 8, 16)
    ]
    assert_same(net, plain(steps))
    assert all(there and moved for _, there, moved in bodies)


def test_batches_weigh_what_the_script_says(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    twin, gradients = copy.deepcopy(net), []

    batches = iter(loader)
    for weight in (1.0, 3.0):
        x, y, _ = next(batches)
        with line.accumulate(2):
            line.backward(F.mse_loss(net(x), y), weight=weight)
            if weight == 3.0:
                gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
        loss = F.mse_loss(twin(x), y) * weight / 4
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    for mine, part in zip(gradients, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, part.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_without_any_weight_nothing_moves(line: Line, every: int) -> None:
    net, optimizer, loader = prepared(line)
    # A step of it moves weights by a gradient of 0, too.
    optimizer.param_groups[0]["weight_decay"] = 0.5
    before = copy.deepcopy(net)

    for _, (x, y, _) in zip(range(2), loader, strict=False):
        with line.accumulate(every):
            line.backward(F.mse_loss(net(x), y), weight=0)
            optimizer.step()

    assert line.step == 2
    assert_same(net, before)


def test_a_scheduler_steps_with_the_weights_and_rates_may_follow_the_line(line: Line) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    net, optimizer, scheduler, loader = line.prepare(net, optimizer, scheduler, loader)

    for _epoch in line.epochs(EPOCHS):
        for x, y, _ in loader:
            with line.accumulate(2):
                for group in optimizer.param_groups:
                    group["seen"] = line.step
                line.backward(F.mse_loss(net(x), y) * 0)
                optimizer.step()
                scheduler.step()

    assert optimizer.param_groups[0]["lr"] == 0.5**4


def test_a_run_that_is_resumed_in_the_middle_of_an_accumulation_goes_on_with_its_sum(
    tmp_path: Path,
) -> None:
    first = Line(seed=3, device="cpu", run_dir=tmp_path, checkpoint_every=1, total_steps=4)
    train(first, 3)
    first.close()

    again = Line(
        seed=3, device="cpu", run_dir=tmp_path / "again", resume=checkpoint_folder(tmp_path, 4)
    )
    net, bodies = train(again, 3)
    again.close()

    assert [step for step, _, _ in bodies] == [5, 6]
    assert [moved for _, _, moved in bodies] == [False, True]
    assert_same(net, plain([(0, 0, 22), (1, 0, 22)]))


def test_a_run_that_ends_in_the_middle_of_an_accumulation_says_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Line(seed=3, device="cpu", total_steps=5) as line:
        train(line, 3)

    assert "the gradients of its last 2 batches moved no weights" in caplog.text


def test_a_resumed_script_that_does_not_accumulate_any_more_is_told(tmp_path: Path) -> None:
    first = Line(seed=3, device="cpu", run_dir=tmp_path, checkpoint_every=1, total_steps=1)
    train(first, 2)
    first.close()
    again = Line(seed=3, device="cpu", resume=checkpoint_folder(tmp_path, 1))
    net, _optimizer, loader = prepared(again)
    x, y, _ = next(iter(loader))

    with pytest.raises(RuntimeError, match=r"outside line\.accumulate"):
        again.backward(F.mse_loss(net(x), y))
    again.close()


def test_another_number_and_a_body_outside_are_errors_in_the_middle(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    batches = iter(loader)
    x, y, _ = next(batches)
    with line.accumulate(3):
        line.backward(F.mse_loss(net(x), y))
        optimizer.step()
    x, y, _ = next(batches)

    with pytest.raises(RuntimeError, match="after 1 of 3 batches"), line.accumulate(2):
        pass
    with pytest.raises(RuntimeError, match=r"outside line\.accumulate"):
        line.backward(F.mse_loss(net(x), y))


def test_no_batches_and_accumulations_within_another_are_refused(line: Line) -> None:
    prepared(line)

    with pytest.raises(ValueError, match="from 1 on, not 0"), line.accumulate(0):
        pass
    with (
        pytest.raises(RuntimeError, match="was called inside"),
        line.accumulate(2),
        line.accumulate(2),
    ):
        pass


def test_a_loop_that_accumulates_by_hand_learns_of_both_remedies(line: Line) -> None:
    net, optimizer, loader = prepared(line)

    def train_by_hand() -> None:
        for number, (x, y, _) in enumerate(loader):
            line.backward(F.mse_loss(net(x), y) / 4)
            if (number + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"line\.accumulate\(k\).*micro_batch_size=n"):
        train_by_hand()


def test_a_loss_that_is_divided_is_told_to_be_a_mean_already(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)

    for x, y, _ in loader:
        with line.accumulate(4):
            line.backward(F.mse_loss(net(x), y) / 4)
            optimizer.step()

    assert [text for text in caplog.messages if "divided by 4" in text] == [
        "the loss is divided by 4 inside line.accumulate(4), which takes the mean itself: "
        "gradients are 4 times too small. Leave the division out"
    ]


def test_a_void_round_adds_nothing_to_the_sum() -> None:
    bench = StepBench()
    batch = PositionRange(0, 12)
    for positions, end in (((0, 6), "commit"), ((6, 12), "void late"), ((6, 12), "commit")):
        bench.assign(positions, end=end, batch=batch)
    seen: list[list[torch.Tensor]] = []
    rows: list[torch.Tensor] = []

    for shard in bench.stepper.batches(lambda: None):
        with bench.stepper.accumulate(2):
            bench.stepper.backward(bench.model(bench.inputs[shard.indices]).square().mean(), None)
            seen.append([p.grad.clone() for p in bench.model.parameters() if p.grad is not None])
            rows.append(shard.indices)
            bench.stepper.try_commit()

    bench.model.zero_grad()
    bench.model(bench.inputs[torch.cat([rows[0], rows[1]])]).square().mean().backward()
    expected = [part.grad for part in bench.model.parameters() if part.grad is not None]
    assert [len(each) for each in seen] == [0, 4, 4]
    assert bench.stepper.moves == 1
    for first, again, whole in zip(seen[1], seen[2], expected, strict=True):
        torch.testing.assert_close(first, again)
        torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-6)
