"""A line's life in one process: nothing of it is left, and another one can take its place."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import JoinRefused, Line
from andon_trainer.config import LineConfig
from andon_trainer.hosts.group import HostGroup
from andon_trainer.hosts.member import FollowerMember
from andon_trainer.line.worker import Worker
from andon_trainer.process.launch import WorkerLaunch
from andon_trainer.process.launched_service import Served, over
from unit.andon_trainer.host_bench import thread_groups
from unit.andon_trainer.solo import BATCH, data, model

Objects = tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]


class Epochs(TensorDataset):
    """A dataset with an epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def objects() -> Objects:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader: DataLoader[Any] = DataLoader(Epochs(*data().tensors), BATCH, num_workers=0)
    return net, optimizer, scheduler, loader


def train(line: Line, parts: Objects, epochs: int = 1) -> None:
    net, optimizer, scheduler, loader = line.prepare(*parts)
    for _epoch in line.epochs(epochs):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
            scheduler.step()


def state_of(parts: Objects) -> list[Any]:
    """Everything that a line could leave behind on a script's objects, and in the process."""
    net, optimizer, scheduler, loader = parts
    return [
        [len(part._post_accumulate_grad_hooks or {}) for part in net.parameters()],
        optimizer.step,
        type(scheduler),
        "set_epoch" in vars(loader.dataset),
        sys.excepthook,
        sys.exit,
        type(exit).__call__,
        signal.getsignal(signal.SIGUSR1),
        signal.getsignal(signal.SIGTERM),
        len(_global_optimizer_pre_hooks),
    ]


@pytest.fixture
def interactive() -> Iterator[None]:
    """A session in which somebody types commands."""
    sys.ps1 = ">>> "
    yield
    del sys.ps1


def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    parts = objects()
    before = state_of(parts)
    line = Line(device="cpu", run_dir=tmp_path)
    train(line, parts)
    assert state_of(parts) != before

    line.close()
    line.close()

    assert state_of(parts) == before


def test_a_second_line_trains_the_same_objects_as_a_plain_loop_does() -> None:
    parts, twins = objects(), objects()
    for _ in range(2):
        with Line(device="cpu") as line:
            train(line, parts)

    net, optimizer, scheduler, loader = twins
    for _ in range(2):
        for x, y, _rows in loader:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            scheduler.step()

    assert optimizer.param_groups[0]["lr"] == parts[1].param_groups[0]["lr"]
    for ours, theirs in zip(parts[0].parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "a later scheduler wraps its gate"])
def test_a_script_goes_on_without_the_line_that_it_closed(*, wrapped: bool) -> None:
    parts = net, optimizer, _scheduler, _loader = objects()
    with Line(device="cpu") as line:
        train(line, parts)
        if wrapped:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    weights = [part.detach().clone() for part in net.parameters()]

    net(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    later.step()

    assert not any(
        torch.equal(now, then) for now, then in zip(net.parameters(), weights, strict=True)
    )


def test_a_line_that_a_cell_left_open_is_closed_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = objects()
    first = Line(device="cpu")
    net, optimizer, _scheduler, loader = first.prepare(*parts)
    x, y, _ = next(iter(loader))
    first.backward(F.mse_loss(net(x), y))
    optimizer.step()

    with Line(device="cpu") as second:
        train(second, parts)

    assert [text for text in caplog.messages if "step 1 and not closed" in text]
    assert second.complete
    with pytest.raises(RuntimeError, match="this Line is closed"):
        first.backward(F.mse_loss(net(x), y))


def test_a_line_that_came_to_its_end_is_closed_for_the_next_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    parts = objects()
    first = Line(device="cpu")
    train(first, parts)

    with Line(device="cpu") as second:
        train(second, parts)

    assert [text for text in caplog.messages if "not closed" in text] == []


def on_a_service(line: Line) -> None:
    """Makes a line that trains alone look as if it trained with others."""
    line._session.worker.config = dataclasses.replace(
        line._session.worker.config, address="alpha:7070"
    )


def test_a_script_that_trains_on_a_line_makes_no_second_one() -> None:
    with Line(device="cpu") as first:
        first.prepare(*objects())
        on_a_service(first)

        with pytest.raises(RuntimeError, match=r"trains on a line already.*line\.close\(\) first"):
            Line(device="cpu")


@pytest.mark.usefixtures("interactive")
def test_a_session_that_trains_on_a_line_closes_it_for_a_second_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Line(device="cpu")
    first.prepare(*objects())
    on_a_service(first)

    with Line(device="cpu"):
        assert first._session.closed

    assert "step 0 and not closed" in caplog.text


@pytest.mark.parametrize(
    ("error", "crash"),
    [
        (ValueError("no"), "ValueError('no')"),
        (KeyboardInterrupt(), "KeyboardInterrupt()"),
        (SystemExit(1), "SystemExit(1)"),
        (SystemExit(0), "None"),
    ],
)
def test_what_ends_a_with_block_is_the_workers_failure(error: BaseException, crash: str) -> None:
    line = Line(device="cpu")

    with pytest.raises(type(error)), line:
        raise error

    assert repr(line._session.worker.crash) == crash


@pytest.mark.usefixtures("interactive")
@pytest.mark.parametrize(
    ("last", "done", "crash"),
    [
        (ValueError("cell"), False, "ValueError('cell')"),
        (SystemExit(1), False, "SystemExit(1)"),
        (SystemExit(0), False, "None"),
        (ValueError("cell"), True, "None"),
        (None, False, "None"),
    ],
)
def test_in_a_session_the_cell_that_failed_says_how_the_run_ended(
    monkeypatch: pytest.MonkeyPatch, *, last: BaseException | None, done: bool, crash: str
) -> None:
    line = Line(device="cpu")
    if last is not None:
        monkeypatch.setattr(sys, "last_value", last, raising=False)
        monkeypatch.setattr(sys, "last_exc", last, raising=False)
    line._session.complete = done

    line._life.close_at_exit()

    assert repr(line._session.worker.crash) == crash


def test_a_prepare_that_was_refused_may_be_put_right_and_called_again(line: Line) -> None:
    net, optimizer, scheduler, loader = parts = objects()
    closures = torch.optim.LBFGS(net.parameters())
    whole: DataLoader[Any] = DataLoader(data(), batch_size=None)

    with pytest.raises(ValueError, match="one gradient"):
        line.prepare(net, closures, scheduler, loader)
    with pytest.raises(ValueError, match="batch_size=None"):
        line.prepare(net, optimizer, scheduler, whole)
    train(line, parts)

    assert line.complete
    with pytest.raises(RuntimeError, match="make a new Line in the cell that prepares"):
        line.prepare(*parts)


@pytest.fixture
def _nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andon_trainer.line.worker._done", [])


def follow_to_the_end(run_id: str) -> LineConfig:
    """A process that is not its host's first trains a run to its end."""
    config = LineConfig(address="localhost:1", run_id=run_id)
    worker = Worker(config, torch.device("cpu"))
    worker.member = FollowerMember(cast(HostGroup, thread_groups(2)[1]), worker.replica)
    worker.leave()
    return config


@pytest.mark.usefixtures("_nothing_done")
def test_each_process_of_a_host_refuses_the_run_that_it_has_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = follow_to_the_end("7f3a")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    with pytest.raises(JoinRefused, match="has trained run 7f3a to its end"):
        Worker(config, torch.device("cpu"))

    # It gives the refusal its exit code if nobody catches it, and watches for no worker.
    assert sys.excepthook is not sys.__excepthook__
    Worker(LineConfig(), torch.device("cpu")).leave()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.usefixtures("_nothing_done")
@pytest.mark.parametrize(("run_id", "code"), [("7f3a", 4), ("7f3", 4), ("b2", 0)])
def test_that_a_run_is_over_is_no_success_where_this_process_trained_it(
    monkeypatch: pytest.MonkeyPatch, run_id: str, code: int
) -> None:
    for each in ("7f3", "7f3a"):
        follow_to_the_end(each)
    later = Worker(LineConfig(address="localhost:2"), torch.device("cpu"))

    def locate(_launch: WorkerLaunch, _config: LineConfig) -> LineConfig:
        raise JoinRefused("complete", over(Served(port=1, run_id=run_id, run_dir="runs/it")))

    monkeypatch.setattr(WorkerLaunch, "locate", locate)
    with pytest.raises(JoinRefused, match=f"run {run_id} ") as refused:
        later.begin()

    assert refused.value.exit_code == code
    later.leave()
