"""What `andon export` writes: a table, JSON, and files of TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import struct
from pathlib import Path

import pytest

from andon_cli.app import main
from andon_cli.commands.epochs import EPOCH_COLUMNS
from andon_cli.commands.export import STEP_COLUMNS, column_names
from andon_server.runs import JOURNAL
from unit.andon_cli.books import Book


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of three steps, with scalars at steps 0, 2 and 9."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "7f3a"
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL)
    book.found()
    for step, loss in ((1, 2.0), (2, math.nan), (3, 1.0)):
        book.step(step, loss)
    book.log(0, 0, lr=0.1)
    book.log(0, 2, val=0.5, loss=7.0)
    book.log(1, 2, val=0.25)
    book.log(0, 3, val=math.nan)
    book.close()
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_a_step_and_a_column_a_scalar(run: Path, tmp_path: Path) -> None:
    assert main(["export", "7f3a", "--output", "steps.csv"]) == 0

    rows = table(tmp_path / "steps.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert list(rows[0]) == [*STEP_COLUMNS, "logged.loss", "lr", "val"]
    assert [row["loss"] for row in rows] == ["", "2.0", "", "1.0"]
    assert [row["lr"] for row in rows] == ["0.1", "", "", ""]
    assert [row["val"] for row in rows] == ["", "", "0.375", "nan"]
    assert rows[2]["logged.loss"] == "7.0"
    assert (rows[3]["workers"], rows[3]["samples"], rows[3]["samples_per_second"]) == (
        "2", "4", "2.0",
    )  # fmt: skip


def test_the_table_by_epoch_has_means_by_samples_and_the_last_that_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "0001").mkdir(parents=True)
    book = Book(tmp_path / "runs" / "0001" / JOURNAL)
    book.found()
    for step, loss, epoch in ((1, 2.0, 0), (2, 1.0, 0), (3, math.nan, 0), (4, 0.5, 1)):
        book.step(step, loss, epoch=epoch)
    book.log(0, 1, val=0.5)
    book.log(0, 2, val=0.25)
    book.close()

    assert main(["export", "--by", "epoch"]) == 0
    first, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert main(["export", "--by", "epoch", "--format", "json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main(["export", "--by", "epoch", "--format", "tensorboard"]) == 0
    assert capsys.readouterr().out.startswith("wrote 9 points")
    main(["show", "0001", "--format", "json"])
    shown = json.loads(capsys.readouterr().out)["epochs"]
    main(["show", "0001"])

    assert first == [*EPOCH_COLUMNS, "val"]
    assert [row[:7] for row in rows] == [
        ["0", "3", "1", "3", "12", "1.5", "6.0"],
        ["1", "1", "4", "4", "4", "0.5", "2.0"],
    ]
    assert [row[-1] for row in rows] == ["0.25", ""]
    assert set(as_json) == {"run", "epochs"}
    assert [(each["loss"], each["val"]) for each in as_json["epochs"]] == [(1.5, 0.25), (0.5, None)]
    [file] = (tmp_path / "runs" / "0001" / "tensorboard").iterdir()
    assert b"epoch/val" in file.read_bytes()
    assert b"step/loss" not in file.read_bytes()
    assert [each["loss"] for each in shown] == [1.5, 0.5]
    assert "0      1 to 3  12       1.5   6.0 s" in capsys.readouterr().out


def test_a_table_without_scalars_has_the_columns_of_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "0001").mkdir(parents=True)
    book = Book(tmp_path / "runs" / "0001" / JOURNAL)
    book.found()
    book.step(1, 2.0)
    book.close()

    main(["export"])

    first, row = capsys.readouterr().out.splitlines()
    assert first == ",".join(STEP_COLUMNS)
    assert row.startswith("1,0,2.0,,4,4.0,,,2.0,2.0,0,2,0,")


def test_a_name_that_a_steps_column_has_gets_another_column() -> None:
    assert column_names(["loss", "val", "val/loss"]) == ["logged.loss", "val", "val/loss"]


@pytest.mark.usefixtures("run")
def test_json_has_the_values_of_every_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--format", "json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert [step["loss"] for step in told["steps"]] == [2.0, None, 1.0]
    assert [
        (each["name"], each["step"], each["worker"], each["value"]) for each in told["scalars"]
    ] == [
        ("loss", 2, 0, 7.0),
        ("lr", 0, 0, 0.1),
        ("val", 2, 0, 0.5),
        ("val", 2, 1, 0.25),
        ("val", 3, 0, None),
    ]
    assert told["run"]["run_id"] == "7f3a"


def test_tensorboard_gets_a_curve_a_name_and_a_second_export_replaces_the_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["export", "7f3a", "--format", "tensorboard"]) == 0

    [file] = (run / "tensorboard").iterdir()
    told = capsys.readouterr().out
    events = records(file.read_bytes())
    # Of three steps: two losses, and three each of seconds, samples/s and workers.
    assert told.startswith("wrote 15 points to ")
    assert len(events) == 1 + 15
    assert b"brain.Event:2" in events[0]
    assert sum(b"step/loss" in each for each in events) == 2
    [of_step_2] = [each for each in events if b"val" in each and struct.pack("<f", 0.375) in each]
    assert b"\x10\x02" in of_step_2  # Event.step, field 2, is 2


def test_a_place_that_can_not_be_written_is_an_error_with_the_remedy(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "7f3a", "--output", "missing/steps.csv"]) == 1

    assert capsys.readouterr().err == (
        "andon: missing/steps.csv can't be written (No such file or directory): choose another "
        "--output\n"
    )


def records(data: bytes) -> list[bytes]:
    """The records of an event file, without looking at the checksums."""
    found = []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found
