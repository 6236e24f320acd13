"""The epochs of a run by its journal: what the committed steps of each came to.

They are the sums that scripts are told at an epoch's end (`Callback.on_epoch`), whoever was there:
each step's loss counts by its samples, steps that were rolled back do not count, and neither do
samples that an operator left out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from andon_cli.drawing.texts import aligned, grouped
from andon_coordinator.transport.reader import JournalEntry
from andon_coordinator.transport.step_reader import StepReader

__all__ = ["EPOCH_COLUMNS", "EpochTotals", "add_step", "epoch_lines", "epoch_rows", "epochs_of"]

EPOCH_COLUMNS = (
    "epoch", "steps", "first_step", "last_step", "samples", "loss", "seconds", "at_unix_s",
)  # fmt: skip
"""The columns of an epoch, before those of the scalars; names stay."""
_SHOWN = 10
"""So many of the last epochs are shown to people."""


@dataclass(slots=True, kw_only=True)
class EpochTotals:
    """The committed steps of one epoch, taken together."""

    epoch: int
    first_step: int
    last_step: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """What its steps took."""
    at_unix_s: float = 0.0
    """When the last one was committed."""
    loss_sum: float = 0.0
    loss_samples: int = 0
    """Samples of those steps that have a loss."""

    @property
    def loss(self) -> float | None:
        """The mean loss, each step counted by its samples; None if no step has one."""
        return self.loss_sum / self.loss_samples if self.loss_samples else None

    def cells(self) -> tuple[Any, ...]:
        """The values of `EPOCH_COLUMNS`."""
        return tuple(getattr(self, name) for name in EPOCH_COLUMNS)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return dict(zip(EPOCH_COLUMNS, self.cells(), strict=True))


def epochs_of(reader: StepReader) -> list[EpochTotals]:
    """The epochs in which steps were committed, in order; the last one may not be over."""
    found: dict[int, EpochTotals] = {}
    for step in reader.steps_forward():
        add_step(found, step.entry)
    return list(found.values())


def add_step(found: dict[int, EpochTotals], entry: JournalEntry) -> None:
    """Adds a committed step to its epoch, in the order of steps."""
    result, number = entry.result, entry.record.step
    assert result is not None
    if result.epoch not in found:
        found[result.epoch] = EpochTotals(epoch=result.epoch, first_step=number)
    epoch = found[result.epoch]
    epoch.last_step = number
    epoch.steps += 1
    epoch.samples += result.samples
    epoch.seconds += result.seconds
    epoch.at_unix_s = entry.at_unix_s
    if not math.isnan(result.loss):
        epoch.loss_sum += result.loss * result.samples
        epoch.loss_samples += result.samples


def epoch_rows(reader: StepReader) -> Iterator[Sequence[Any]]:
    """The table: its columns, then a row for each epoch.

    A scalar's column has what was logged last up to the epoch's last step, and in this epoch: the
    evaluation at its end, where there was one. Else it is None.
    """
    names = reader.scalar_names()
    yield (*EPOCH_COLUMNS, *(f"logged.{name}" if name in EPOCH_COLUMNS else name for name in names))
    curves = [[*reader.scalar_curve(name)] for name in names]
    for epoch in epochs_of(reader):
        yield (*epoch.cells(), *(_last_within(epoch, curve) for curve in curves))


def _last_within(epoch: EpochTotals, curve: Sequence[tuple[int, float]]) -> float | None:
    """The last value of a curve in an epoch; its points are in the order of steps."""
    at = bisect_right(curve, epoch.last_step, key=lambda point: point[0]) - 1
    return curve[at][1] if at >= 0 and curve[at][0] >= epoch.first_step else None


def epoch_lines(epochs: Sequence[EpochTotals]) -> list[str]:
    """The last epochs for people, if there were several."""
    if len(epochs) < 2:
        return []
    rows = [
        (
            str(each.epoch),
            f"{each.first_step} to {each.last_step}",
            grouped(each.samples),
            "-" if each.loss is None else f"{each.loss:.6g}",
            f"{each.seconds:.1f} s",
        )
        for each in epochs[-_SHOWN:]
    ]
    lines = aligned([("epoch", "steps", "samples", "loss", "took"), *rows])
    if earlier := len(epochs[:-_SHOWN]):
        lines.append(f"{earlier} earlier epochs: andon export --by epoch")
    return lines
