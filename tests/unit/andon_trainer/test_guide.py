"""The guide: its Python runs, and does what its pages say."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from andon.protocol.order import Order
from andon_trainer import Callback, Fit, Line, Trainer

DOCS = Path(__file__).resolve().parents[3] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAMPLES = 30


class Net(nn.Module):
    """A classifier, always with the same initial weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores.movedim(-1, 1)


class Ema:
    """An average of weights that counts how often it moved."""

    def __init__(self, model: nn.Module) -> None:
        self.moves = 0
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        self.moves += 1
        for mine, parameter in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"moves": self.moves, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moves, self.weights = state["moves"], state["weights"]


def lr_at(step: int) -> float:
    return 0.1 / (1 + step)


def samples(targets: torch.Tensor) -> TensorDataset:
    shape = (*targets.shape, 4)
    return TensorDataset(torch.randn(shape, generator=torch.Generator().manual_seed(1)), targets)


def padded() -> torch.Tensor:
    """Targets of which most are padding, of some sequences all."""
    targets = torch.arange(SAMPLES * 6).reshape(SAMPLES, 6) % 3
    targets[torch.arange(6) >= torch.arange(SAMPLES)[:, None] % 5] = -100
    return targets


def blocks(page: str) -> list[str]:
    """A page's blocks of Python, in order."""
    return _BLOCK.findall((DOCS / f"{page}.md").read_text("utf-8"))


def run(page: str, number: int = 0, **more: Any) -> dict[str, Any]:
    """Runs one of a page's blocks; what it defined. `more`: names of blocks before it."""
    given: dict[str, Any] = {
        "Callback": Callback,
        "copy": copy,
        "DataLoader": DataLoader,
        "Ema": Ema,
        "F": F,
        "Fit": Fit,
        "IterableDataset": IterableDataset,
        "Line": Line,
        "Net": Net,
        "Trainer": Trainer,
        "WeightedRandomSampler": WeightedRandomSampler,
        "lr_at": lr_at,
        "nn": nn,
        "padded_set": samples(padded()),
        "random_split": random_split,
        "torch": torch,
        "train_set": samples(torch.arange(SAMPLES) % 3),
        "val_set": samples(torch.arange(SAMPLES) % 2),
        **more,
    }
    exec(compile(blocks(page)[number], f"{page}.md", "exec"), given)
    if "line" in given:
        given["line"].close()
    return given


def batches(count: int, size: int = 8) -> list[torch.Tensor]:
    """The samples of a run's first steps."""
    found = [
        torch.from_numpy(Order(1, epoch, SAMPLES).indices(start, min(start + size, SAMPLES)))
        for epoch in range(3)
        for start in range(0, SAMPLES, size)
    ]
    return found[:count]


def step_plainly(model: nn.Module, loss: torch.Tensor, lr: float = 0.1) -> None:
    """One step of plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()


def train_plainly(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
    """One step of plain PyTorch on a whole batch."""
    step_plainly(model, F.cross_entropy(model(x), y), lr)


def plain_twin(
    data: TensorDataset, rates: list[float], *, size: int = 8, twin: nn.Module | None = None
) -> nn.Module:
    """What plain PyTorch makes of a model in the first steps, each at its rate."""
    twin, (x, y) = twin or Net(), data.tensors
    for lr, rows in zip(rates, batches(len(rates), size), strict=True):
        train_plainly(twin, x[rows], y[rows], lr)
    return twin


def same(model: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in pairs)


def test_what_runs_once_a_step_does_so_with_micro_batches_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run("guide/plain-script")

    twin = Net()
    ema, (x, y) = Ema(twin), done["train_set"].tensors
    for step, rows in enumerate(batches(11)):
        train_plainly(twin, x[rows], y[rows], lr_at(step))
        ema.update(twin)
    assert (done["line"].step, done["ema"].moves, ema.moves) == (11, 11, 11)
    assert same(done["model"], twin)
    for ours, theirs in zip(done["ema"].weights, ema.weights, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["5", "10"]


def test_what_is_done_to_the_mean_is_what_a_hook_does_in_one_process() -> None:
    done = run("guide/plain-script", 3)

    twin = Net()
    clamped = [0]

    def clamp(gradient: torch.Tensor) -> torch.Tensor:
        clamped[0] += int((gradient.abs() > 0.05).sum())
        return gradient.clamp(-0.05, 0.05)

    for part in twin.parameters():
        part.register_hook(clamp)  # type: ignore[no-untyped-call]  # torch's own
    plain_twin(done["train_set"], [0.1] * 4, twin=twin)

    assert clamped[0], "the sample shows nothing"
    assert same(done["model"], twin)


def test_a_rate_that_follows_the_epoch_is_that_of_the_lines_epoch() -> None:
    done = run("guide/plain-script", 1)

    rates = [0.1 * 0.5 ** (step // 4) for step in range(12)]
    assert same(done["model"], plain_twin(done["train_set"], rates))


def test_accumulated_batches_are_one_step_of_the_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run("guide/plain-script", 2)

    twin = Net()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = done["train_set"].tensors
    for rows in batches(4, 16):
        optimizer.zero_grad()
        F.cross_entropy(twin(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]  # torch's own
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    assert same(done["model"], twin)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "4", "8", "12", "16",
    ]  # fmt: skip


def test_a_cell_runs_twice_with_the_same_objects() -> None:
    done = run("guide/notebooks")

    after_a_cell = plain_twin(done["train_set"], [0.1] * 8)
    assert same(done["model"], plain_twin(done["train_set"], [0.01] * 8, twin=after_a_cell))
    assert "step" not in vars(done["optimizer"])


def test_a_token_mean_with_its_weight_is_that_of_the_whole_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = run("guide/losses")

    assert done["line"].step == 4
    assert same(done["model"], plain_twin(done["padded_set"], [0.1] * 4))
    assert caplog.messages == []


def test_a_seeded_split_is_the_same_each_time_and_whole_batches_are_dealt() -> None:
    first, second = run("guide/data"), run("guide/data")

    assert first["train_part"].indices == second["train_part"].indices
    assert len(first["loader"]) == 3


def test_a_sampler_of_ones_own_says_how_long_an_epoch_is() -> None:
    done = run("guide/data", 1)

    assert len(done["loader"]) == 4
    assert done["loader"].sampler is done["sampler"]


def test_a_batch_of_a_batch_sampler_is_a_step_and_its_samples_are_counted() -> None:
    done = run("guide/data", 2)

    assert (done["line"].step, len(done["loader"])) == (8, 4)
    assert 0 <= done["line"].accuracy <= 1


def test_after_the_last_epoch_a_script_evaluates_on_all_samples() -> None:
    done = run("guide/data", 3)

    x, y = done["train_set"].tensors
    assert done["right"] == int((done["model"](x).argmax(1) == y).sum())
    assert (done["line"].step, int(done["average"].n_averaged)) == (8, 8)


def test_an_evaluation_sees_every_sample_once() -> None:
    done = run("guide/evaluation")

    x, y = done["val_set"].tensors
    with torch.no_grad():
        expected = F.cross_entropy(done["model"](x), y).item()
    assert done["n"] == SAMPLES
    assert done["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_numbers_are_logged_beside_a_step_and_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run("guide/logging")

    assert set(done["line"].logged) == {"lr", "val/loss"}
    assert done["line"].logged["lr"] == pytest.approx(0.1 * 0.9**8)
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["epoch", "0", "validation"],
        ["epoch", "1", "validation"],
    ]


def test_what_is_logged_is_also_written_for_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    run("guide/logging", 1)

    (events,) = (tmp_path / "runs/adam/tensorboard").iterdir()
    assert events.read_bytes().count(b"loss") == 4


def test_a_run_stops_early_after_three_epochs_without_a_better_evaluation() -> None:
    done = run("guide/evaluation", 1)

    assert done["line"].stopped == "3 evaluations without a better one"
    assert done["line"].covered


def test_what_all_workers_predicted_is_gathered() -> None:
    done = run("guide/evaluation", 2)

    assert int(done["confusion"].sum()) == SAMPLES
    assert done["found"]["wanted"].tolist() == [each % 2 for each in range(SAMPLES)]


def test_a_stream_is_trained_on_in_whole_epochs() -> None:
    done = run("guide/data", 4)

    assert (done["line"].step, done["line"].epoch) == (2 * 13, 2)


def test_indices_without_a_loader_are_those_of_the_order() -> None:
    done = run("guide/data", 5)

    assert done["line"].step == 2 * 4
    assert done["line"].epoch == 2


def test_micro_batches_change_nothing_but_the_memory_that_a_forward_takes() -> None:
    done = run("guide/micro-batches")

    assert done["line"].step == 4
    assert same(done["model"], plain_twin(done["train_set"], [0.1] * 4, size=16))


def test_grains_train_like_the_batch_that_they_are_cut_from() -> None:
    done = run("guide/same-bits")

    assert same(done["model"], plain_twin(done["train_set"], [0.1] * 4, size=16))


def test_a_tally_is_the_mean_over_the_whole_set() -> None:
    done = run("guide/same-bits", 1)

    x, y = done["val_set"].tensors
    with torch.no_grad():
        scores = done["model"](x)
    expected = float(F.cross_entropy(scores, y)), float((scores.argmax(1) == y).float().mean())
    found = done["means"]["loss"], done["means"]["accuracy"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_hidden_state_is_carried_through_the_columns_of_a_text() -> None:
    done = run("guide/carried-state")

    torch.manual_seed(1)
    twin = done["Reader"]()
    columns = done["text"].view(8, -1)
    for _epoch in range(2):
        state = None
        for start in range(0, 70, 10):
            scores, state = twin(columns[:, start : start + 10], state)
            state = tuple(part.detach() for part in state)
            targets = columns[:, start + 1 : start + 11].flatten()
            step_plainly(twin, F.cross_entropy(scores.flatten(0, 1), targets), lr=0.5)
    assert done["line"].step == 14
    assert same(done["model"], twin)


def test_a_loss_of_gathered_samples_is_that_of_one_process() -> None:
    done = run("guide/coupled-losses")

    torch.manual_seed(1)
    twin = done["TwoViews"]()
    x, _ = done["train_set"].tensors
    for rows in batches(8):
        scores = twin(x[rows]) @ twin(x[rows].flip(1)).T * twin.scale.exp()
        step_plainly(twin, F.cross_entropy(scores, torch.arange(len(rows))))
    assert done["line"].step == 8
    assert same(done["model"], twin)


def test_a_task_is_a_sample_in_maml() -> None:
    done = run("guide/coupled-losses", 1)

    twin = Net()
    for epoch in range(4):
        order = Order(1, epoch, 5).indices(0, 5).tolist()
        for rows in (order[:3], order[3:]):
            losses = [done["adapted_loss"](twin, *done["tasks"][row]) for row in rows]
            step_plainly(twin, torch.stack(losses).mean())
    assert done["line"].step == 8
    assert same(done["model"], twin)


def test_a_layer_that_is_frozen_for_an_epoch_trains_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    done = run("guide/models")

    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = done["train_set"].tensors
    for step, rows in enumerate(batches(8)):
        twin[0].requires_grad_(step >= 4)
        train_plainly(twin, x[rows], y[rows], 0.1)
    assert same(done["model"], twin)


@pytest.mark.parametrize("number", [1, 2], ids=["bfloat16", "float16"])
def test_half_precision_trains(number: int) -> None:
    done = run("guide/micro-batches", number)

    assert done["line"].step == 8
    assert all(part.dtype is torch.float32 for part in done["model"].parameters())


def test_a_gradient_penalty_is_a_part_of_the_loss() -> None:
    done = run("guide/several-models", 0)

    twin = Net()
    inputs, targets = done["train_set"].tensors
    for rows in batches(8):
        x = inputs[rows].requires_grad_()
        scores = twin(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        step_plainly(twin, F.cross_entropy(scores, targets[rows]) + slopes.square().sum(1).mean())
    assert done["line"].step == 8
    assert same(done["model"], twin)


def test_an_optimizer_with_a_closure_steps_by_hand_as_it_does_alone() -> None:
    done = run("guide/several-models", 2)

    twin = Net()
    optimizer = torch.optim.LBFGS(twin.parameters(), line_search_fn="strong_wolfe")
    x, y = done["train_set"].tensors

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss.item()

    for _ in range(5):
        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch's own
    assert done["line"].step == 5
    assert same(done["model"], twin)


def test_two_gradients_a_step_by_hand_are_those_of_sharpness_aware_minimisation() -> None:
    done = run("guide/several-models", 3)

    twin = Net()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, y = done["train_set"].tensors
    for _ in range(20):
        weights = [part.detach().clone() for part in twin.parameters()]
        gradients = torch.autograd.grad(F.cross_entropy(twin(x), y), list(twin.parameters()))
        norm = torch.stack([part.norm() for part in gradients]).norm() + 1e-12
        with torch.no_grad():
            for part, gradient in zip(twin.parameters(), gradients, strict=True):
                part.add_(0.05 * gradient / norm)
        optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        with torch.no_grad():
            for part, weight in zip(twin.parameters(), weights, strict=True):
                part.copy_(weight)
        optimizer.step()
    assert done["line"].step == 20
    assert same(done["model"], twin)


@pytest.mark.parametrize(
    ("page", "number", "steps"),
    [("models", 1, 8), ("several-models", 1, 20)],
    ids=["a compiled model", "two models by hand"],
)
def test_a_sample_makes_its_steps(page: str, number: int, steps: int) -> None:
    assert run(f"guide/{page}", number)["line"].step == steps


def test_the_trainer_calls_back_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("guide/trainer")

    assert done["report"].steps == 20
    assert [each.step for each in done["report"].evaluations] == list(range(2, 21, 2))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "5", "10", "15", "20", "20",
    ]  # fmt: skip

    background = run("guide/trainer", 1, trainer=done["trainer"])

    ended = background["report"].stopped, background["run"].metrics().state
    assert ended in [("good enough", "stopped"), ("epochs", "complete")]  # A fast one is done.


def test_learning_rates_follow_the_batch() -> None:
    optimizers: list[torch.optim.Optimizer] = []

    class Noted(Trainer):
        def __post_init__(self) -> None:
            made = self.optimizer

            def noted(model: nn.Module) -> torch.optim.Optimizer:
                optimizers.append(made(model))
                return optimizers[-1]

            object.__setattr__(self, "optimizer", noted)

    run("guide/batch-size", Trainer=Noted)

    assert optimizers[0].param_groups[0]["lr"] == 0.2


def test_a_run_begins_from_weights_that_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Net().state_dict(), "model.pt")

    done = run("guide/checkpoints", 3)

    assert same(done["model"], Net())


def test_the_first_run_prints_a_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    run("first-run")

    page = (DOCS / "first-run.md").read_text("utf-8")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    assert printed[0].rpartition(" ")[0] in page


def test_the_two_scripts_side_by_side_are_those_of_the_examples() -> None:
    page = (DOCS / "guide/from-ddp.md").read_text("utf-8")

    shown = re.findall(r'^```python title="\w+"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)

    folder = DOCS.parent / "examples/from_ddp"
    assert shown == [(folder / f"with_{name}.py").read_text("utf-8") for name in ("ddp", "line")]


def test_every_page_of_your_script_has_a_sample_that_is_run() -> None:
    counts = {
        path.stem: len(blocks(f"guide/{path.stem}")) for path in (DOCS / "guide").glob("*.md")
    }

    # From DDP: two scripts side by side, of which one is for DDP. Halts: what to catch.
    # Watching: pandas, which reads what was exported. Plain PyTorch: the scripts of examples/plain.
    assert {name: count for name, count in counts.items() if count} == {
        "batch-size": 1,
        "carried-state": 1,
        "checkpoints": 4,
        "coupled-losses": 2,
        "data": 6,
        "evaluation": 3,
        "halts": 1,
        "logging": 2,
        "losses": 1,
        "micro-batches": 3,
        "models": 2,
        "notebooks": 1,
        "plain-pytorch": 2,
        "plain-script": 4,
        "same-bits": 2,
        "several-models": 4,
        "trainer": 2,
        "watching": 1,
    }
