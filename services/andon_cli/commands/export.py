"""`andon export`: a run's steps, and what its script logged, for other programs.

The table has a row a step and a column a scalar, as pandas and spreadsheets want it. Rows are
written while the journal is read, so the length of a run does not matter. With `--by epoch` it has
a row an epoch.
"""

from __future__ import annotations

import csv
import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from andon.host.errors import CommandError, ExitCode
from andon.host.private_files import open_private
from andon.host.scalar_files import TensorBoardFile
from andon.host.strict_json import strict_json
from andon.protocol.records import accuracy_of
from andon.protocol.scalars import Scalar
from andon_cli.commands.epochs import EPOCH_COLUMNS, epoch_rows
from andon_cli.commands.run_facts import RunFacts, find_folder, reading
from andon_cli.questions import ExportConfig
from andon_coordinator.transport.step_reader import CommittedStep, StepReader

__all__ = ["STEP_COLUMNS", "export_run", "json_pieces", "table_rows", "write_tensorboard"]

STEP_COLUMNS = (
    "step", "epoch", "loss", "accuracy", "samples", "weight", "correct", "gradient_norm", "seconds",
    "samples_per_second", "attempt", "workers", "overflow", "at_unix_s",
)  # fmt: skip
"""The columns of a step, before those of the scalars; names stay."""

_CURVES = ("loss", "accuracy", "gradient_norm", "seconds", "samples_per_second", "workers")
"""The columns that TensorBoard gets, as `step/loss` and so on."""

_EPOCH_CURVES = ("loss", "samples", "seconds", "steps")
"""Those of an epoch that it gets, as `epoch/loss` and so on."""

Point = tuple[Scalar, float]
"""A point of a curve, and when it was measured, in seconds since the Unix epoch."""


def export_run(config: ExportConfig) -> int:
    """Exports a run. Returns the exit code.

    Raises:
        UsageError: there is no such run.
        JournalError: its journal can't be read.
        CommandError: the output can't be written.
    """
    folder, output = find_folder(config.run), config.settings.output
    with reading(folder) as reader:
        if config.settings.format == "tensorboard":
            target = output or folder / "tensorboard"
            points = epoch_points if config.settings.by == "epoch" else step_points
            with _writing_to(target):
                count = write_tensorboard(points(reader), target)
            print(f"wrote {count} points to {target}: tensorboard --logdir {target}")
            return ExitCode.COMPLETE
        if output is None:
            _write(reader, config, folder, sys.stdout)
        else:
            with (
                _writing_to(output),
                open(
                    output,
                    "w",
                    encoding="utf-8",
                    newline="",
                    errors="backslashreplace",
                    opener=open_private,
                ) as file,
            ):
                _write(reader, config, folder, file)
    return ExitCode.COMPLETE


def table_rows(reader: StepReader) -> Iterator[Sequence[Any]]:
    """The table: its columns, then a row for each step that was committed or logged at.

    A scalar's column has the mean over the workers that logged it. A step at which nothing was
    logged, such as most steps for a validation loss, has None there. What was logged before the
    first step is in a row of step 0.
    """
    names = reader.scalar_names()
    curves = {name: dict(reader.scalar_curve(name)) for name in names}
    yield (*STEP_COLUMNS, *column_names(names))
    committed = ((step.entry.record.step, step) for step in reader.steps_forward())
    logged = (
        (step, None) for step in sorted({step for curve in curves.values() for step in curve})
    )
    blank = (None,) * (len(STEP_COLUMNS) - 1)
    last = None
    for step, row in heapq.merge(committed, logged, key=lambda each: (each[0], each[1] is None)):
        if step != last or row is not None:
            scalars = (curves[name].get(step) for name in names)
            yield (*(_cells(row) if row is not None else (step, *blank)), *scalars)
        last = step


def column_names(names: Sequence[str]) -> list[str]:
    """The column of each scalar: its name, or `logged.NAME` where a step's column is called so."""
    return [f"logged.{name}" if name in STEP_COLUMNS else name for name in names]


def json_by_epoch(reader: StepReader, folder: Path) -> Iterator[str]:
    """The run as one JSON object, an epoch a line."""
    facts = RunFacts.read(folder).fields()
    facts.pop("scalars")
    facts.pop("epochs")
    yield f'{{"run": {strict_json(facts)},\n"epochs": ['
    columns, *rows = epoch_rows(reader)
    for number, row in enumerate(rows):
        yield (",\n" if number else "\n") + strict_json(dict(zip(columns, row, strict=True)))
    yield "\n]}\n"


def json_pieces(reader: StepReader, folder: Path) -> Iterator[str]:
    """The run as one JSON object, a step a line."""
    facts = RunFacts.read(folder).fields()
    facts.pop("scalars")
    yield f'{{"run": {strict_json(facts)},\n"steps": ['
    for number, step in enumerate(reader.steps_forward()):
        fields = dict(zip(STEP_COLUMNS, _cells(step), strict=True))
        yield (",\n" if number else "\n") + strict_json(fields)
    yield '\n],\n"scalars": ['
    for number, each in enumerate(
        scalar for name in reader.scalar_names() for scalar in reader.scalars(name)
    ):
        fields = {
            "name": each.name, "step": each.step, "worker": each.worker, "value": each.value,
            "at_unix_s": each.at_unix_s,
        }  # fmt: skip
        yield (",\n" if number else "\n") + strict_json(fields)
    yield "\n]}\n"


def write_tensorboard(points: Iterable[Point], folder: Path) -> int:
    """Writes event files of TensorBoard. Returns the number of points.

    A former export into the folder is replaced: TensorBoard would draw both over each other.

    Raises:
        OSError: they can't be written.
    """
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    count = 0
    with TensorBoardFile(folder) as file:
        for scalar, at_unix_s in points:
            file.write(scalar, 0, at_unix_s)
            count += 1
    return count


def step_points(reader: StepReader) -> Iterator[Point]:
    """The curves of the steps, and what scripts logged, over the steps."""
    for step in reader.steps_forward():
        cells = dict(zip(STEP_COLUMNS, _cells(step), strict=True))
        for name in _CURVES:
            if cells[name] is not None:
                scalar = Scalar(f"step/{name}", cells["step"], float(cells[name]))
                yield scalar, cells["at_unix_s"]
    for name in reader.scalar_names():
        moments: defaultdict[int, float] = defaultdict(float)
        for each in reader.scalars(name):
            moments[each.step] = max(moments[each.step], each.at_unix_s)
        for number, value in reader.scalar_curve(name):
            yield Scalar(name, number, value), moments[number]


def epoch_points(reader: StepReader) -> Iterator[Point]:
    """The means of the epochs, and what was logged last in each, over the epochs."""
    columns, *rows = epoch_rows(reader)
    for row in rows:
        cells = dict(zip(columns, row, strict=True))
        for name in (*_EPOCH_CURVES, *columns[len(EPOCH_COLUMNS) :]):
            if cells[name] is not None:
                scalar = Scalar(f"epoch/{name}", cells["epoch"], float(cells[name]))
                yield scalar, cells["at_unix_s"]


def _write(reader: StepReader, config: ExportConfig, folder: Path, file: TextIO) -> None:
    by_epoch = config.settings.by == "epoch"
    if config.settings.format == "json":
        pieces = json_by_epoch if by_epoch else json_pieces
        for piece in pieces(reader, folder):
            file.write(piece)
        return
    table = csv.writer(file, lineterminator="\n")
    for row in epoch_rows(reader) if by_epoch else table_rows(reader):
        table.writerow(row)


def _cells(step: CommittedStep) -> tuple[Any, ...]:
    """The values of `STEP_COLUMNS`; None where there is none."""
    entry, result = step.entry, step.entry.result
    assert result is not None
    return (
        entry.record.step,
        result.epoch,
        None if math.isnan(result.loss) else result.loss,
        accuracy_of(result.correct, result.samples),
        result.samples,
        result.weight,
        result.correct,
        result.gradient_norm,
        result.seconds,
        result.samples / result.seconds if result.seconds > 0 else None,
        result.attempt,
        step.workers,
        int(result.overflow),
        entry.at_unix_s,
    )


@contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(
            f"{error.filename or path} can't be written ({error.strerror}): choose another --output"
        ) from error
