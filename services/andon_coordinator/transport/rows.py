"""Rows: what the journal's tables hold, as the line's own values."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_coordinator.core.effects import SaveRecord, Skip, StepContribution, StepResult
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.transport.schema import key_blob, key_of, ranges_of, u64_of, u64_text

__all__ = [
    "CONTRIBUTION_COLUMNS",
    "DROPPED",
    "INSERT_RECORD",
    "LAST_RECORD",
    "LOST",
    "RECORD_COLUMNS",
    "Row",
    "RunEnd",
    "abandoned",
    "ancestry",
    "contribution_of",
    "ends",
    "find",
    "gaps",
    "last_record",
    "out_of_order",
    "record_of",
    "record_values",
    "result_of",
    "rolled_back",
    "skip_of",
    "walk_back",
]

Row = tuple[Any, ...]

LOST = "LOST"
"""The reason of a departure that was not on purpose."""

DROPPED = "DROPPED"
"""The reason of a departure of a worker that a person sent away."""

_WELL = frozenset(reason.name for reason in LeaveReason if reason.in_order)

LAST_RECORD = "(SELECT coalesce(max(id), 0) FROM records)"
"""The number of the last record, within a statement; 0: there is none."""

RECORD_COLUMNS = (
    "key, parent, kind, step, epoch, position, roster, batch_epoch, batch_start, batch_stop, halt,"
    " operator, loss, samples, weight, attempt, seconds, stop_reason, correct, note, at,"
    " gradient_norm, id"
)
"""The columns that `record_of`, `result_of` and `skip_of` read."""

CONTRIBUTION_COLUMNS = "worker, rank, ranges, samples, weight, loss_sum"
"""The columns that `contribution_of` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How workers went, as `ending` wants to know it."""

    roster: tuple[int, ...]
    """Workers of the last STEP since the run was begun or resumed; none if there is none."""
    ended: dict[int, bool]
    """Who went since then, and whether in order."""
    over: bool
    """Whether that STEP was recorded as the run's last one."""
    dropped: frozenset[int]
    """Slots of workers that people sent away, and that nobody took since."""


INSERT_RECORD = f"INSERT INTO records ({RECORD_COLUMNS}) VALUES ({', '.join('?' * 23)})"
"""Appends what `record_values` gives."""


def record_values(effect: SaveRecord, at_unix_s: float) -> Row:
    """The row of a record that is to be appended; its id is the database's to give."""
    record, result, skipped = effect.record, effect.result, effect.skipped
    epoch = start = stop = halt = operator = None
    if skipped is not None:
        epoch, start, stop = skipped.epoch, skipped.positions.start, skipped.positions.stop
        halt, operator = u64_text(skipped.halt_id), skipped.operator
    loss = samples = weight = attempt = seconds = stop_reason = correct = norm = None
    if result is not None:
        epoch, start, stop = result.epoch, result.batch.start, result.batch.stop
        loss = None if math.isnan(result.loss) else result.loss
        samples, weight, attempt = result.samples, result.weight, result.attempt
        seconds, stop_reason, correct = result.seconds, result.stop_reason, result.correct
        norm = result.gradient_norm
    return (
        key_blob(record.key),
        None if record.parent is None else key_blob(record.parent),
        record.kind.name,
        record.step,
        record.cursor.epoch,
        record.cursor.position,
        json.dumps(list(record.roster), separators=(",", ":")),
        *(epoch, start, stop, halt, operator),
        *(loss, samples, weight, attempt, seconds, stop_reason, correct),
        *(effect.note, at_unix_s, norm, None),
    )


def walk_back(database: sqlite3.Connection, columns: str = RECORD_COLUMNS) -> Iterator[Row]:
    """The rows of the line's history, newest first: those that the last record descends from.

    Read as far as it is asked for, so that the last steps of a long run are found at once. The
    first two of the columns must be key and parent.
    """
    parent: bytes | None = None
    for number, row in enumerate(
        database.execute(f"SELECT {columns} FROM records ORDER BY id DESC")
    ):
        # A record that only workers knew (rule 9) is missing: the chain goes on before it.
        if number == 0 or (parent is not None and row[0] <= parent):
            yield row
            parent = row[1]


def ancestry(database: sqlite3.Connection) -> Iterator[Key]:
    """The keys of the line's history, newest first."""
    return (key_of(key) for key, _ in walk_back(database, "key, parent"))


def find(database: sqlite3.Connection, key: Key) -> Row | None:
    """The row of a record; None if there is none. No key has an index: ids are in their order."""
    wanted, (last,) = key_blob(key), database.execute("SELECT max(id) FROM records").fetchone()
    low, high = 1, last or 0
    while low <= high:
        middle = (low + high) // 2
        row: Row = database.execute(
            f"SELECT {RECORD_COLUMNS} FROM records WHERE id = ?", (middle,)
        ).fetchone()
        if row[0] == wanted:
            return row
        low, high = (middle + 1, high) if row[0] < wanted else (low, middle - 1)
    return None


def rolled_back(database: sqlite3.Connection) -> int:
    """The number of the record that last rolled the line back; 0: none did."""
    number: int | None = database.execute("SELECT rolled_back FROM totals").fetchone()[0]
    return number or 0


def gaps(database: sqlite3.Connection) -> tuple[int, int]:
    """How often records were missing before one, and at which step last; (0, 0) if never."""
    number, step = database.execute(
        "SELECT gaps, (SELECT step FROM records WHERE id = gap) FROM totals"
    ).fetchone()
    return number, step or 0


def out_of_order(database: sqlite3.Connection, newest: int = 1000) -> int | None:
    """The step of a record, of the newest so many, that is not newer than the one before it, or
    whose parent is not older than itself; None if there is none, as there should be."""
    after: Row | None = None
    for row in database.execute(
        "SELECT key, parent, step FROM records ORDER BY id DESC LIMIT ?", (newest,)
    ):
        if (after is not None and row[0] >= after[0]) or (row[1] is not None and row[1] >= row[0]):
            return int((after or row)[2])
        after = row
    return None


def last_record(database: sqlite3.Connection) -> int:
    """The number of the last record; 0: there is none."""
    number: int = database.execute(f"SELECT {LAST_RECORD}").fetchone()[0]
    return number


def ends(database: sqlite3.Connection) -> RunEnd:
    """How the workers of the line's present history went."""
    since = rolled_back(database)
    step = next((row for row in walk_back(database) if row[2] == RecordKind.STEP.name), None)
    if step is not None and step[-1] < since:
        step = None
    gone = database.execute(
        "SELECT worker, reason, record FROM departures WHERE record >= ? ORDER BY rowid", (since,)
    ).fetchall()
    roster: tuple[int, ...] = () if step is None else tuple(json.loads(step[6]))
    ended: dict[int, bool] = {}
    for worker, reason, record in gone:
        if step is None or record >= step[-1]:
            ended[worker] = reason in _WELL or ended.get(worker, False)
    # A slot is dropped while its last end is that: whoever took it since stepped, or went as well.
    last = {worker: (reason, record) for worker, reason, record in gone}
    dropped = {
        worker
        for worker, (reason, record) in last.items()
        if reason == DROPPED and not (step is not None and worker in roster and record < step[-1])
    }
    return RunEnd(
        roster=roster,
        ended=ended,
        over=step is not None and bool(step[17]),
        dropped=frozenset(dropped),
    )


def abandoned(database: sqlite3.Connection) -> Key | None:
    """The greatest key that a roll-back may have left out of the line's history; None: never."""
    row = database.execute(
        "SELECT key FROM records WHERE id = (SELECT rolled_back - 1 FROM totals)"
    ).fetchone()
    return None if row is None else key_of(row[0])


def record_of(row: Row) -> Record:
    """The record of a row."""
    key, parent, kind, step, epoch, position, roster, *_ = row
    return Record(
        key=key_of(key),
        parent=None if parent is None else key_of(parent),
        # Journals of Andon 0.1 before its first release call the INITIAL record FOUND.
        kind=RecordKind.INITIAL if kind == "FOUND" else RecordKind[kind],
        step=step,
        cursor=Cursor(epoch, position),
        roster=tuple(json.loads(roster)),
    )


def result_of(row: Row, contributions: tuple[StepContribution, ...]) -> StepResult:
    """The result of a STEP's row."""
    epoch, start, stop = row[7:10]
    loss, samples, weight, attempt, seconds, stop_reason, correct = row[12:19]
    gradient_norm = row[21]
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
        gradient_norm=gradient_norm,
    )


def skip_of(row: Row) -> Skip | None:
    """What the MARK of a row skipped, if it did."""
    epoch, start, stop, halt, operator = row[7:12]
    if halt is None:
        return None
    return Skip(epoch, PositionRange(start, stop), u64_of(halt), operator)


def contribution_of(row: Row, batch_start: int) -> StepContribution:
    """The contribution of a row, to a step whose batch starts there."""
    worker, rank, ranges, samples, weight, loss_sum = row
    return StepContribution(
        worker=worker,
        rank=rank,
        positions=ranges_of(ranges, batch_start),
        samples=samples,
        weight=weight,
        loss_sum=math.nan if loss_sum is None else loss_sum,
    )
