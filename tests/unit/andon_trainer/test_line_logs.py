"""What a script logs and prints: which numbers it may log, and the files of a worker alone."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from andon.protocol.limits import MAX_SCALAR_NAMES
from andon_trainer import Line
from unit.andon_trainer.solo import BATCH, data, model


def joined(**settings: Any) -> tuple[Line, Any, Any, Any]:
    line = Line(device="cpu", **settings)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return line, *line.prepare(net, optimizer, DataLoader(data(), BATCH))


def logging_each_step(**settings: Any) -> Iterator[Line]:
    """A line alone, after each step of one epoch."""
    line, net, optimizer, loader = joined(**settings)
    with line:
        for _epoch in line.epochs(1):
            for x, y, _ in loader:
                optimizer.zero_grad()
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
                yield line


def rows(path: Path) -> list[tuple[int, str, int, float]]:
    with path.open(newline="") as file:
        return [
            (int(row["step"]), row["name"], int(row["worker"]), float(row["value"]))
            for row in csv.DictReader(file)
        ]


def test_a_run_alone_with_a_folder_writes_what_it_logs_as_csv(tmp_path: Path) -> None:
    steps = 0
    for line in logging_each_step(run_dir=str(tmp_path)):
        steps = line.step
        line.log({"val/loss": 1 / line.step, "lr": torch.tensor(0.1, dtype=torch.float64)})
        # Whoever reads along sees it at once.
        assert rows(tmp_path / "scalars.csv")[-1] == (line.step, "lr", 0, 0.1)

    assert steps > 1
    assert rows(tmp_path / "scalars.csv")[::2] == [
        (step, "val/loss", 0, 1 / step) for step in range(1, steps + 1)
    ]
    assert line.logged == {"val/loss": 1 / steps, "lr": 0.1}


def test_a_run_alone_without_a_folder_only_keeps_the_last_numbers() -> None:
    for line in logging_each_step():
        loss = torch.ones(1, requires_grad=True).sum()  # With its graph, as losses are.
        line.log({"step": line.step, "ok": True, "gone": math.nan, "loss": loss})

    assert line.logged["step"] == line.step
    assert (line.logged["ok"], line.logged["loss"]) == (1.0, 1.0)
    assert math.isnan(line.logged["gone"])


def test_log_to_tensorboard_writes_its_event_files_and_no_csv(tmp_path: Path) -> None:
    for line in logging_each_step(run_dir=str(tmp_path), log_to="tensorboard"):
        line.log({"val": 0.5})

    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents.")
    assert events.read_bytes().count(b"val") == line.step
    assert not (tmp_path / "scalars.csv").exists()


def test_a_folder_that_can_not_be_written_ends_the_file_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scalars.csv").mkdir()

    for line in logging_each_step(run_dir=str(tmp_path)):
        line.log({"val": 0.5})

    warnings = [each for each in caplog.records if "written to a file" in each.getMessage()]
    assert len(warnings) == 1
    assert line.logged == {"val": 0.5}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("grad norms", 1.0, "letters, digits"),
        ("", 1.0, "letters, digits"),
        ("n" * 65, 1.0, "64"),
        ("val", torch.ones(3), "give it a mean"),
        ("val", "0.5", "logs numbers"),
        ("val", None, "no number for 'val'"),
        ("val", 1j, "no number for 'val'"),
    ],
)
def test_what_is_no_scalar_is_refused_and_nothing_of_the_call_is_kept(
    name: str, value: Any, remedy: str
) -> None:
    line, *_ = joined()
    with line:
        for _ in line.epochs(1):
            with pytest.raises(ValueError, match=remedy):
                line.log({"fine": 1.0, name: value})

            assert line.logged == {}
            break


def test_of_too_many_names_the_further_ones_are_refused_with_one_warning_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line, *_ = joined()
    with line:
        for _ in line.epochs(1):
            many = {f"metric/{number}": number for number in range(MAX_SCALAR_NAMES)}
            for _again in range(2):
                line.log({**many, "one.more": 1.0})
            break

    assert line.logged == many
    (warning,) = [each.getMessage() for each in caplog.records if "names" in each.getMessage()]
    assert "one.more" in warning


def test_a_line_that_has_not_joined_or_is_closed_can_not_log() -> None:
    line = Line(device="cpu")
    with pytest.raises(RuntimeError, match=r"line\.prepare"):
        line.log({"val": 1.0})
    line.close()
    with pytest.raises(RuntimeError, match="closed"):
        line.log({"val": 1.0})


def test_a_script_with_manual_steps_logs_too(tmp_path: Path) -> None:
    net = model()
    with Line(device="cpu", run_dir=str(tmp_path)) as line:
        line.join(net)
        line.log({"reward": 2})

    assert rows(tmp_path / "scalars.csv") == [(0, "reward", 0, 2.0)]


def test_print_prints_on_the_worker_of_rank_0_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Line(device="cpu") as line:
        line.print("val", 0.5, sep="=", end=";")
        assert line.is_main
    assert capsys.readouterr().out == "val=0.5;"

    monkeypatch.setenv("RANK", "1")
    with Line(device="cpu") as line:
        line.print("val", 0.5)
        assert not line.is_main
    assert capsys.readouterr().out == ""


def test_log_to_needs_a_folder_and_a_form_that_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_dir"):
        Line(device="cpu", log_to="csv")
    with pytest.raises(ValueError, match="csv or tensorboard"):
        Line(device="cpu", run_dir=str(tmp_path), log_to="wandb")  # type: ignore[arg-type]  # wrong
