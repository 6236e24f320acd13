"""The Trainer, alone: what it computes, when it evaluates and ends, and where it goes on."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from andon.protocol.order import Order
from andon_trainer import Callback, Epoch, Fit, Line, Report, Trainer
from andon_trainer.fit.batches import call_model, samples_in, weighted
from andon_trainer.fit.seeds import WorkerSeeds

SAMPLES = 22


def data(samples: int = SAMPLES) -> TensorDataset:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def trainer(**changes: Any) -> Trainer:
    usual: dict[str, Any] = {
        "model": net,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "data": lambda: (data(), data(9)),
    }
    return Trainer(**{**usual, **changes})


def test_a_fit_computes_what_plain_pytorch_does() -> None:
    report = trainer().fit(Fit(batch_size=8, epochs=2, seed=3))

    torch.manual_seed(3)
    twin, (x, y) = net(), data().tensors
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for epoch in range(2):
        order = Order(3, epoch, SAMPLES)
        for start in (0, 8, 16):
            rows = torch.from_numpy(order.indices(start, min(start + 8, SAMPLES)))
            optimizer.zero_grad()
            F.mse_loss(twin(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
    assert report.model is not None
    for ours, theirs in zip(report.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (report.steps, report.epochs, report.stopped) == (6, 2, "epochs")


def test_bfloat16_learns_as_float32_does() -> None:
    settings: Any = {"batch_size": 8, "micro_batch_size": 4, "epochs": 3, "max_grad_norm": 1.0}

    whole = trainer().fit(Fit(**settings))
    half = trainer().fit(Fit(**settings, precision="bfloat16"))

    assert half.losses == pytest.approx(whole.losses, rel=0.05)
    assert half.digest != whole.digest


def test_a_float16_step_that_overflows_moves_neither_weights_nor_schedule() -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_step(self, step: Any) -> None:
            rates.append(step.learning_rate)

    report = trainer(
        loss=lambda model, batch: 50 * F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        scheduler="linear",
        callbacks=[Rates()],
    ).fit(Fit(batch_size=8, micro_batch_size=4, steps=16, max_grad_norm=9.0, precision="float16"))

    overflows = rates.count(1e-3) - 1  # The rate begins to fall with the first step that moves.
    assert 2 <= overflows < 14
    assert rates[overflows:] == pytest.approx([1e-3 * (1 - n / 16) for n in range(16 - overflows)])
    assert max(report.losses) < 50 * 20  # The scale is not in them.
    assert report.losses[-1] < report.losses[0]


class Seen(Callback):
    """Notes what it is told; stops the run after a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[Any] = []
        self.stop_at = stop_at

    def on_start(self, line: Line, model: nn.Module) -> None:
        self.line = line

    def on_step(self, step: Any) -> None:
        self.calls.append(step.number)
        if step.number == self.stop_at:
            self.line.stop("that will do")

    def on_epoch(self, epoch: Epoch) -> None:
        self.calls.append(f"epoch {epoch.number}")

    def on_evaluate(self, evaluation: Any) -> None:
        self.calls.append(f"evaluated at {evaluation.step} in {evaluation.epoch}")

    def on_checkpoint(self, folder: Path) -> None:
        self.calls.append(folder.name)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        (
            {"epochs": 2, "evaluate_every": "epoch"},
            [1, 2, 3, "evaluated at 3 in 0", "epoch 0", 4, 5, 6, "evaluated at 6 in 1", "epoch 1"],
        ),
        (
            {"epochs": 1, "evaluate_every": 2},
            [1, 2, "evaluated at 2 in 0", 3, "evaluated at 3 in 0", "epoch 0"],
        ),
        ({"steps": 2, "evaluate_every": "epoch"}, [1, 2, "evaluated at 2 in 0"]),
        (
            {"steps": 4, "evaluate_every": 3},
            [1, 2, 3, "evaluated at 3 in 0", "epoch 0", 4, "evaluated at 4 in 1"],
        ),
        ({"steps": 3}, [1, 2, 3, "epoch 0"]),
    ],
    ids=["epochs", "steps in an epoch", "the end is no epoch's", "the end too", "never"],
)
def test_evaluations_come_when_they_are_due_and_at_the_end_once(
    settings: dict[str, Any], calls: list[Any]
) -> None:
    seen = Seen()

    trainer(callbacks=[seen]).fit(Fit(batch_size=8, **settings))

    assert seen.calls == calls


class Ahead(Callback):
    """A worker whose own weights are ahead of the line's, which are 1 everywhere."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.line: Line | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["line"], name)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        own = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict({name: torch.ones_like(each) for name, each in own.items()})
        yield
        self.model.load_state_dict(own)

    def on_start(self, line: Line, model: nn.Module) -> None:
        self.line, self.model = line, model

    def on_step(self, step: Any) -> None:
        own = copy.deepcopy(self.model.state_dict())
        loader = DataLoader(data(9), batch_size=4)
        self.found = trainer()._evaluate(
            cast("Line", self), self.model, loader, Fit(batch_size=8, steps=1)
        )
        assert all(torch.equal(own[name], part) for name, part in self.model.state_dict().items())


def test_evaluations_are_of_the_weights_that_all_workers_have_in_common() -> None:
    ahead, common = Ahead(), net()
    for part in common.parameters():
        nn.init.ones_(part)

    trainer(callbacks=[ahead]).fit(Fit(batch_size=8, steps=1))

    x, y = data(9).tensors
    assert ahead.found["loss"] == pytest.approx(F.mse_loss(common(x), y).item())


class Epochs(Callback):
    """Notes the epochs, and the losses of their steps."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.losses: list[float] = []

    def on_step(self, step: Any) -> None:
        self.losses.append(step.loss)

    def on_epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)


def test_an_epoch_is_the_mean_of_its_steps_by_samples_also_after_a_restart(tmp_path: Path) -> None:
    fit: Any = {"batch_size": 8, "run_dir": tmp_path, "checkpoint_every": 2, "evaluate_every": 3}
    before, after = Epochs(), Epochs()
    trainer(callbacks=[before]).fit(Fit(**fit, steps=2))

    trainer(callbacks=[after]).fit(Fit(**fit, epochs=2, resume="latest"))

    losses = [*before.losses, *after.losses]
    assert (before.epochs, [each.number for each in after.epochs]) == ([], [0, 1])
    for epoch, (one, two, three) in zip(after.epochs, (losses[:3], losses[3:]), strict=True):
        assert epoch.loss == pytest.approx((8 * one + 8 * two + 6 * three) / SAMPLES)
        assert (epoch.samples, epoch.steps) == (SAMPLES, 3)
        assert epoch.seconds > 0
        assert epoch.evaluation is not None
        assert epoch.evaluation.epoch == epoch.number


def test_a_callback_ends_the_run_by_the_line() -> None:
    seen = Seen(stop_at=2)

    report = trainer(callbacks=[seen]).fit(Fit(batch_size=8, epochs=5))

    assert report.stopped == "that will do"
    assert report.steps <= 3


def test_metrics_are_exact_means_over_the_validation_set() -> None:
    x, y = data(9).tensors

    def halves(predictions: torch.Tensor, targets: torch.Tensor) -> tuple[Any, float]:
        rows = targets[:, 0] > 0  # A mean over some of the samples, of a batch perhaps over none.
        return (predictions[rows] > 0).float().mean(), float(rows.sum())

    report = trainer(
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"recall": halves, "error": lambda p, t: (p - t).abs().mean()},
    ).fit(Fit(batch_size=8, micro_batch_size=2, steps=3, evaluate_every=3))

    (found,), model = report.evaluations, report.model
    assert model is not None
    with torch.no_grad():
        predictions = model(x)
    assert found.loss == pytest.approx(F.mse_loss(predictions, y).item(), rel=1e-6)
    assert found.metrics["error"] == pytest.approx((predictions - y).abs().mean().item(), rel=1e-6)
    wanted = (predictions[y > 0] > 0).float().mean().item()
    assert found.metrics["recall"] == pytest.approx(wanted, rel=1e-6)


def test_evaluations_are_logged_by_names_that_scalars_can_have(tmp_path: Path) -> None:
    report = trainer(
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"error (L1)": lambda p, t: (p - t).abs().mean()},
    ).fit(Fit(batch_size=8, steps=4, evaluate_every=2, run_dir=str(tmp_path)))

    rows = (tmp_path / "scalars.csv").read_text().splitlines()
    assert rows == [
        "step,name,worker,value",
        *(
            row
            for each in report.evaluations
            for row in (
                f"{each.step},val/loss,0,{each.loss!r}",
                f"{each.step},val/error__L1_,0,{each.metrics['error (L1)']!r}",
            )
        ),
    ]


def test_a_metric_without_predict_gets_the_model_in_evaluation_mode() -> None:
    def dropped(model: nn.Module, batch: Any) -> float:
        return float(model.training)

    report = trainer(metrics={"training": dropped}).fit(
        Fit(batch_size=8, steps=1, evaluate_every=1)
    )

    assert report.evaluations[0].metrics == {"training": 0.0}
    assert report.model is not None
    assert report.model.training


def test_patience_ends_a_run_that_gets_no_better_and_the_best_is_kept(tmp_path: Path) -> None:
    values = iter([0.3, 0.5, 0.4, 0.5, 0.2])  # The last of the step that ends the run.

    report = trainer(metrics={"score": lambda model, batch: next(values)}).fit(
        Fit(batch_size=16, micro_batch_size=9, epochs=9, evaluate_every=1, patience=2,
            keep_best="score",
            run_dir=tmp_path)
    )  # fmt: skip

    assert report.stopped == "2 evaluations without a better one"
    assert (tmp_path / "checkpoints/best").resolve().name == "step-00000002"
    assert report.best is not None
    assert (report.best.step, report.best.metrics["score"]) == (2, 0.5)


def test_a_callback_with_a_state_goes_into_checkpoints(tmp_path: Path) -> None:
    class Counter(Callback):
        steps = 0

        def on_step(self, step: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    settings: Any = {
        "batch_size": 8,
        "checkpoint_every": 2,
        "run_dir": tmp_path,
        "resume": "latest",
    }
    trainer(callbacks=[Counter()]).fit(Fit(steps=4, **settings))
    counter = Counter()

    trainer(callbacks=[counter]).fit(Fit(steps=5, **settings))

    assert counter.steps == 5


def resumable(steps: int, folder: Path, seen: Seen, **settings: Any) -> Report:
    random.seed(0)
    return trainer(
        model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 1)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0
        ),
        callbacks=[seen],
    ).fit(
        Fit(batch_size=8, steps=steps, checkpoint_every=4, evaluate_every=3, run_dir=folder, seed=2,
            **settings)
    )  # fmt: skip


def test_a_fit_goes_on_from_its_newest_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole = resumable(9, tmp_path / "whole", Seen(), resume="latest")
    resumable(5, tmp_path / "half", Seen())
    damaged = tmp_path / "half/checkpoints/step-00000005"
    (damaged / "model.safetensors").write_bytes(b"torn")

    resumed = resumable(9, tmp_path / "half", Seen(), resume="latest")

    assert resumed.digest == whole.digest
    assert resumed.losses == whole.losses[4:]
    assert resumed.evaluations == whole.evaluations[1:]
    assert resumed.best == whole.best


def test_callbacks_are_told_of_every_checkpoint_also_of_the_last_steps(tmp_path: Path) -> None:
    seen = Seen()

    report = resumable(8, tmp_path, seen)

    names = ["step-00000004", "step-00000008"]
    assert [call for call in seen.calls if str(call).startswith("step-")] == names
    assert [folder.name for folder in report.checkpoints] == names


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor


class WithHead(nn.Module):
    """A wrapper that carries a model and computes its loss, as transformers' task heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        return Output(F.mse_loss(self.backbone(x), y))


def pairs(samples: list[Any]) -> Pair:
    return Pair(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


def named(samples: list[Any]) -> UserDict[str, torch.Tensor]:
    made = pairs(samples)
    return UserDict(x=made.x, y=made.y)


@pytest.mark.parametrize("collate", [pairs, named, None], ids=["dataclass", "encoding", "pair"])
def test_a_model_that_computes_its_loss_needs_no_loss_function(
    collate: Callable[[list[Any]], Any] | None, tmp_path: Path
) -> None:
    whole = Trainer(
        model=WithHead,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=lambda: (data(), data(9)),
        collate_fn=collate,
        inner=lambda model: model.get_submodule("backbone"),
    )

    report = whole.fit(
        Fit(batch_size=8, epochs=1, evaluate_every=2, save_to=tmp_path / "out/model.safetensors")
    )

    saved = load_file(tmp_path / "out/model.safetensors")
    assert report.model is not None
    assert saved.keys() == {"weight", "bias"}
    assert torch.equal(saved["weight"], report.model.get_parameter("backbone.weight"))
    assert report.losses[-1] < report.losses[0]


def test_a_loader_of_ones_own_is_taken_as_it_is_and_not_configured_twice() -> None:
    def loaders() -> Any:
        sampler = WeightedRandomSampler([1.0] * SAMPLES, 16)
        return DataLoader(data(), batch_size=8, sampler=sampler), DataLoader(data(9), batch_size=3)

    with pytest.raises(ValueError, match="a DataLoader, which has its own batch_size, drop_last"):
        trainer(data=loaders).fit(Fit(batch_size=8, drop_last=True, epochs=1))

    report = trainer(data=loaders).fit(Fit(epochs=2, evaluate_every="epoch"))

    assert (report.steps, len(report.evaluations)) == (2 * 2, 2)


def test_a_stream_without_a_length_trains_by_epochs_or_by_steps() -> None:
    streaming = trainer(data=lambda: (Stream(), Stream()))

    by_epochs = streaming.fit(Fit(batch_size=8, epochs=2, evaluate_every="epoch"))
    by_steps = streaming.fit(Fit(batch_size=8, steps=4))

    x, y = data().tensors
    assert by_epochs.model is not None
    with torch.no_grad():
        expected = F.mse_loss(by_epochs.model(x), y).item()
    assert by_epochs.evaluations[-1].loss == pytest.approx(expected, rel=1e-6)
    assert (by_epochs.steps, by_epochs.epochs, by_steps.steps) == (2 * 3, 2, 4)
    assert by_steps.losses == by_epochs.losses[:4]


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {}, r"how many samples has a step\? Write Fit\(batch_size="),
        ({"data": lambda: (data(), None)}, {"batch_size": 8, "evaluate_every": 1},
         "evaluate_every needs a validation set"),
        ({"scheduler": "linear", "data": lambda: (Stream(), None)}, {"batch_size": 8},
         r"the length of this training set is not known.*Fit\(steps="),
        ({"scheduler": "cosin"}, {"batch_size": 8}, "there is no scheduler 'cosin'"),
        ({}, {"batch_size": 8, "warmup_steps": 2}, "a warm-up belongs to a scheduler by name"),
    ],
    ids=["batch", "validation", "length", "name", "warm-up"],
)  # fmt: skip
def test_what_can_not_work_is_refused_with_what_to_write(
    changes: dict[str, Any], settings: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(**changes).fit(Fit(epochs=1, **settings))


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream without a length."""

    def __iter__(self) -> Any:
        return iter(data())


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (UserDict(ids=torch.zeros(3, 5), text=["a", "b", "c"]), 3),  # as a tokenizer's encoding
        (UserDict(text=["a", "b", "c"], ids=torch.zeros(3, 5)), 3),
        ({"scale": torch.tensor(2.0), "x": (torch.zeros(4),)}, 4),
        ([torch.zeros(6, 2), torch.zeros(6)], 6),
        (Pair(torch.zeros(2, 2), torch.zeros(2)), 2),
    ],
    ids=["encoding", "text first", "a number first", "pair", "dataclass"],
)
def test_any_mapping_sequence_or_dataclass_tells_how_many_samples_it_holds(
    batch: Any, samples: int
) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize("batch", [["a", "b"], "text", torch.tensor(1.0), {"a": None}, 3])
def test_a_batch_without_samples_is_an_error_that_says_what_to_return(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"let `loss` return \(mean, weight\)"):
        samples_in(batch)


@pytest.mark.parametrize(
    ("result", "mean", "weight"),
    [
        (torch.tensor(2.0), 2.0, None),
        ((torch.tensor(2.0), 3), 2.0, 3.0),
        (Output(torch.tensor(2.0)), 2.0, None),
        (OrderedDict(loss=torch.tensor(2.0), logits=torch.zeros(3)), 2.0, None),
        ((Output(torch.tensor(2.0)), torch.tensor(5)), 2.0, 5.0),
    ],
    ids=["mean", "weighted", "output", "mapping", "weighted output"],
)
def test_a_loss_is_a_mean_a_weighted_mean_or_an_output_that_has_one(
    result: Any, mean: float, weight: float | None
) -> None:
    found, of = weighted(result, "loss")

    assert (float(found), of) == (mean, weight)


def test_an_output_without_a_loss_is_refused() -> None:
    with pytest.raises(TypeError, match=r"loss returned list: return the mean.*has `labels`"):
        weighted([1, 2], "loss")


def test_a_batch_that_is_one_tensor_is_the_models_argument() -> None:
    assert call_model(nn.Identity(), torch.ones(2)).tolist() == [1.0, 1.0]


def test_the_loss_is_no_metric_of_its_own() -> None:
    with pytest.raises(ValueError, match="the loss is averaged by itself"):
        trainer(metrics={"loss": lambda model, batch: 0.0})


def test_every_rank_and_step_has_random_numbers_of_its_own_in_each_run() -> None:
    def drawn(seed: int, step: int, rank: int) -> tuple[float, ...]:
        seeds = WorkerSeeds(seed)
        seeds.begin(step, rank)
        first = torch.rand(2).tolist()
        seeds.begin(step, rank)  # The step's next micro-batch goes on.
        return (*first, *torch.rand(1).tolist())

    cases = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (-1, 0, 0)]
    found = [drawn(*case) for case in cases]

    assert found == [drawn(*case) for case in cases]
    assert len({number for numbers in found for number in numbers}) == 3 * len(cases)
