"""Rows: what the journal's tables hold, as the line's own values."""

from __future__ import annotations

import json
import math
from typing import Any

from andon.records import Cursor, PositionRange, Record, RecordKind
from andon_coordinator.core.effects import Contribution, Skip, StepResult
from andon_coordinator.transport.schema import key_of, ranges_of, u64_of

__all__ = [
    "CONTRIBUTION_COLUMNS",
    "LOST",
    "RECORD_COLUMNS",
    "Row",
    "contribution_of",
    "record_of",
    "result_of",
    "skip_of",
]

Row = tuple[Any, ...]

LOST = "LOST"
"""The reason of a departure that was not on purpose."""

RECORD_COLUMNS = (
    "key, parent, kind, step, epoch, position, roster, batch_epoch, batch_start, batch_stop, halt,"
    " operator, loss, samples, weight, attempt, seconds, stop_reason, correct, note, at"
)
"""The columns that `record_of`, `result_of` and `skip_of` read."""

CONTRIBUTION_COLUMNS = "worker, rank, ranges, samples, weight, loss_sum"
"""The columns that `contribution_of` reads."""


def record_of(row: Row) -> Record:
    """The record of a row."""
    key, parent, kind, step, epoch, position, roster, *_ = row
    return Record(
        key=key_of(key),
        parent=None if parent is None else key_of(parent),
        kind=RecordKind[kind],
        step=step,
        cursor=Cursor(epoch, position),
        roster=tuple(json.loads(roster)),
    )


def result_of(row: Row, contributions: tuple[Contribution, ...]) -> StepResult:
    """The result of a STEP's row."""
    epoch, start, stop = row[7:10]
    loss, samples, weight, attempt, seconds, stop_reason, correct = row[12:19]
    return StepResult(
        epoch=epoch,
        batch=PositionRange(start, stop),
        loss=math.nan if loss is None else loss,
        samples=samples,
        weight=weight,
        attempt=attempt,
        seconds=seconds,
        contributions=contributions,
        stop_reason=stop_reason,
        correct=correct,
    )


def skip_of(row: Row) -> Skip | None:
    """What the MARK of a row skipped, if it did."""
    epoch, start, stop, halt, operator = row[7:12]
    if halt is None:
        return None
    return Skip(epoch, PositionRange(start, stop), u64_of(halt), operator)


def contribution_of(row: Row) -> Contribution:
    """The contribution of a row."""
    worker, rank, ranges, samples, weight, loss_sum = row
    return Contribution(
        worker=worker,
        rank=rank,
        positions=ranges_of(ranges),
        samples=samples,
        weight=weight,
        loss_sum=math.nan if loss_sum is None else loss_sum,
    )
