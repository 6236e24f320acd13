"""Rows: the journal's tables, read and written as the core's own values."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from andon.protocol.arithmetic import Arithmetic, in_order
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_coordinator.core.departures import has_last_weights
from andon_coordinator.core.effects import SaveArithmetic, SaveRecord
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.spikes import SpikeAction, SpikeDecision
from andon_coordinator.core.step_results import Skip, StepContribution, StepResult
from andon_coordinator.transport.schema import (
    compact_json,
    earlier_of,
    key_blob,
    key_of,
    quorum_of,
    quorum_text,
    ranges_of,
    u64_of,
    u64_text,
)

__all__ = [
    "DROPPED",
    "INSERT_RECORD",
    "LAST_RECORD",
    "LOST",
    "RecordedArithmetic",
    "RunEnd",
    "abandoned",
    "ancestry",
    "arithmetics",
    "barred",
    "contribution_of",
    "find",
    "gaps",
    "halts_of_sessions",
    "has_column",
    "has_table",
    "last_record",
    "out_of_order",
    "record_of",
    "record_values",
    "result_of",
    "revoked",
    "rolled_back",
    "run_end",
    "save_arithmetic",
    "save_spike",
    "skip_of",
    "spikes",
    "walk_back",
]

LOST = "LOST"
"""The reason of a departure that was not on purpose."""

DROPPED = "DROPPED"
"""The reason of a departure of a worker that a person dropped."""

_IN_ORDER = frozenset(reason.name for reason in LeaveReason if reason.in_order)

LAST_RECORD = "(SELECT coalesce(max(id), 0) FROM records)"
"""The number of the last record, as an SQL expression; 0: there is none."""

_COLUMNS = (
    *("key", "parent", "kind", "step", "epoch", "position", "roster"),
    *("batch_epoch", "batch_start", "batch_stop", "halt", "operator"),
    *("loss", "samples", "weight", "attempt", "seconds", "stop_reason", "correct"),
    *("gradient_norm", "note", "at", "overflow", "quorum", "gradient_scale", "trimmed"),
)

INSERT_RECORD = f"INSERT INTO records ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
"""Appends what `record_values` gives; the database numbers the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How the workers of the last step went; see `core.departures.is_complete`."""

    roster: tuple[int, ...]
    """Workers of the last STEP since the run was started or resumed; empty if there is none."""
    departed: dict[int, bool]
    """Workers that are gone since then; True if a worker left in order."""
    over: bool
    """Whether that STEP was recorded as the run's last one."""
    dropped: frozenset[int]
    """Slots of workers that people dropped, and that no process took since."""


def record_values(effect: SaveRecord, at_unix_s: float) -> dict[str, Any]:
    """The values of a record that is to be appended, by column."""
    record, result, skipped = effect.record, effect.result, effect.skipped
    values: dict[str, Any] = dict.fromkeys(_COLUMNS)
    values |= {
        "key": key_blob(record.key),
        "parent": None if record.parent is None else key_blob(record.parent),
        "kind": record.kind.name,
        "step": record.step,
        "epoch": record.cursor.epoch,
        "position": record.cursor.position,
        "roster": compact_json(record.roster),
        "note": effect.note,
        "at": at_unix_s,
        "quorum": quorum_text(
            record.cursor.owed,
            None if skipped is None else skipped.ranges,
            None if result is None else result.change_scale,
            {}
            if result is None
            else {part.worker: part.late for part in result.contributions if part.late},
            () if skipped is None else skipped.earlier,
        ),
    }
    if skipped is not None:
        values |= {
            "batch_epoch": skipped.epoch,
            "batch_start": skipped.positions.start,
            "batch_stop": skipped.positions.stop,
            "halt": u64_text(skipped.halt_id),
            "operator": skipped.operator,
        }
    if result is not None:
        values |= {
            "batch_epoch": result.epoch,
            "batch_start": result.batch.start,
            "batch_stop": result.batch.stop,
            # Explicit: SQLite would store NaN as NULL anyway.
            "loss": None if math.isnan(result.loss) else result.loss,
            "samples": result.samples,
            "weight": result.weight,
            "attempt": result.attempt,
            "seconds": result.seconds,
            "stop_reason": result.stop_reason,
            "correct": result.correct,
            "gradient_norm": result.gradient_norm,
            "overflow": 1 if result.overflow else None,
            "gradient_scale": None if result.gradient_scale == 1.0 else result.gradient_scale,
            "trimmed": result.trimmed,
        }
    return values


# -------------------------------------------------------------------------- finding records


def walk_back(database: sqlite3.Connection, columns: str = "*") -> Iterator[sqlite3.Row]:
    """The rows of the line's history, newest first: the last record and its ancestors.

    Rows are read only as far as the caller asks, so the last steps of a long run are found at once.
    The columns must include key and parent.
    """
    parent: bytes | None = None
    for number, row in enumerate(
        database.execute(f"SELECT {columns} FROM records ORDER BY id DESC")
    ):
        # A parent may be missing, because only workers knew it (rule 9). Then the history goes on
        # with the next older record.
        if number == 0 or (parent is not None and row["key"] <= parent):
            yield row
            parent = row["parent"]


def ancestry(database: sqlite3.Connection) -> Iterator[Key]:
    """The keys of the line's history, newest first."""
    return (key_of(row["key"]) for row in walk_back(database, "key, parent"))


def find(database: sqlite3.Connection, key: Key) -> sqlite3.Row | None:
    """The row of a record; None if there is none.

    Keys have no index, which would cost a write for every step. Ids have the order of the keys, so
    a binary search over them finds a key.
    """
    wanted, low, high = key_blob(key), 1, last_record(database)
    while low <= high:
        middle = (low + high) // 2
        row: sqlite3.Row = database.execute(
            "SELECT * FROM records WHERE id = ?", (middle,)
        ).fetchone()
        if row["key"] == wanted:
            return row
        low, high = (middle + 1, high) if row["key"] < wanted else (low, middle - 1)
    return None


def has_column(database: sqlite3.Connection, table: str, column: str) -> bool:
    """Whether a table has a column: journals of an older program lack some."""
    return any(row[1] == column for row in database.execute(f"PRAGMA table_info({table})"))


def has_table(database: sqlite3.Connection, table: str) -> bool:
    """Whether a journal has a table: those of an older program lack some."""
    found = database.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)
    )
    return found.fetchone() is not None


def halts_of_sessions(database: sqlite3.Connection) -> frozenset[str]:
    """The ids of halts that ended a session, as text."""
    if not has_table(database, "sessions"):
        return frozenset()
    found = database.execute("SELECT halt FROM sessions WHERE halt IS NOT NULL")
    return frozenset(halt for (halt,) in found)


def last_record(database: sqlite3.Connection) -> int:
    """The number of the last record; 0: there is none."""
    number: int = database.execute(f"SELECT {LAST_RECORD}").fetchone()[0]
    return number


def rolled_back(database: sqlite3.Connection) -> int:
    """The number of the record that last rolled the line back; 0: none did."""
    number: int | None = database.execute("SELECT rolled_back FROM totals").fetchone()[0]
    return number or 0


def resumed(database: sqlite3.Connection) -> int:
    """The number of the record with which a person last resumed the run; 0: nobody did."""
    number: int | None = database.execute("SELECT resumed FROM totals").fetchone()[0]
    return number or 0


def abandoned(database: sqlite3.Connection) -> Key | None:
    """The greatest key that a roll-back may have removed from the history; None: there is none."""
    row = database.execute(
        "SELECT key FROM records WHERE id = (SELECT rolled_back - 1 FROM totals)"
    ).fetchone()
    return None if row is None else key_of(row["key"])


def gaps(database: sqlite3.Connection) -> tuple[int, int]:
    """How many records lack their parent, and the step of the last of them; (0, 0) if none."""
    number, step = database.execute(
        "SELECT gaps, (SELECT step FROM records WHERE id = gap) FROM totals"
    ).fetchone()
    return number, step or 0


def out_of_order(database: sqlite3.Connection, newest: int = 1000) -> int | None:
    """The step of a record that is not newer than the one before it, or than its parent.

    Only the `newest` records are checked. None: they are in order, as they should be.
    """
    after: sqlite3.Row | None = None
    for row in database.execute(
        "SELECT key, parent, step FROM records ORDER BY id DESC LIMIT ?", (newest,)
    ):
        if (after is not None and row["key"] >= after["key"]) or (
            row["parent"] is not None and row["parent"] >= row["key"]
        ):
            return int((after or row)["step"])
        after = row
    return None


# ----------------------------------------------------------------------------- departures


def run_end(database: sqlite3.Connection) -> RunEnd:
    """How the workers of the line's present history went."""
    since, since_resumed = rolled_back(database), resumed(database)
    step = next((row for row in walk_back(database) if row["kind"] == RecordKind.STEP.name), None)
    if step is not None and step["id"] < since:
        step = None
    gone = database.execute(
        "SELECT worker, reason, record, step FROM departures WHERE record >= ? ORDER BY rowid",
        (since_resumed,),
    ).fetchall()
    roster: tuple[int, ...] = () if step is None else tuple(json.loads(step["roster"]))
    departed: dict[int, bool] = {}
    last = 0 if step is None else step["step"]
    for worker, reason, record, final_step in gone:
        if record >= (since if step is None else step["id"]):
            ends = reason in _IN_ORDER and has_last_weights(worker, final_step, roster, last)
            departed[worker] = ends or departed.get(worker, False)
    # A slot counts as dropped if its last departure was a drop, unless another process took it
    # since. Such a process shows by taking part in a step, also in one that was given up since, or
    # by a later departure of its own.
    taken, last_step = _last_step(database)
    # In the order in which they were written, so the last departure of a slot stays.
    newest = {worker: (reason, record) for worker, reason, record, _ in gone}
    dropped = {
        worker
        for worker, (reason, record) in newest.items()
        if reason == DROPPED and not (worker in taken and record < last_step)
    }
    return RunEnd(
        roster=roster,
        departed=departed,
        over=step is not None and bool(step["stop_reason"]),
        dropped=frozenset(dropped),
    )


def _last_step(database: sqlite3.Connection) -> tuple[tuple[int, ...], int]:
    """The roster of the last STEP, also if that was given up, and its number; ((), 0): none."""
    row = database.execute(
        "SELECT roster, id FROM records WHERE kind = ? ORDER BY id DESC", (RecordKind.STEP.name,)
    ).fetchone()
    return ((), 0) if row is None else (tuple(json.loads(row["roster"])), row["id"])


def revoked(database: sqlite3.Connection) -> frozenset[int]:
    """Slots that dropped workers ever had: a session of that time may still have its token."""
    found = database.execute("SELECT worker FROM departures WHERE reason = ?", (DROPPED,))
    return frozenset(worker for (worker,) in found)


def barred(database: sqlite3.Connection) -> frozenset[int | str]:
    """Who may not join again: incarnations of dropped workers, and names of their own tokens.

    A run that a person resumes lets everybody in. A line that goes back by itself does not.
    """
    found: set[int | str] = set()
    for incarnation, credential in database.execute(
        "SELECT incarnation, credential FROM barred WHERE record >= ?", (resumed(database),)
    ):
        found.update({u64_of(incarnation), credential} - {""})
    return frozenset(found)


# ---------------------------------------------------------------------------- arithmetics


@dataclass(frozen=True, slots=True)
class RecordedArithmetic:
    """What a worker stated of its arithmetic when it joined, with so many committed steps."""

    worker: int
    node_id: str
    items: Arithmetic
    step: int
    at_unix_s: float


def save_arithmetic(database: sqlite3.Connection, effect: SaveArithmetic, at_unix_s: float) -> None:
    """Saves with which arithmetic a worker joined."""
    database.execute(
        f"INSERT INTO arithmetics VALUES (?, ?, ?, ?, {LAST_RECORD}, ?)",
        (effect.worker, effect.node_id, compact_json(dict(effect.items)), effect.step, at_unix_s),
    )


def arithmetics(database: sqlite3.Connection) -> list[RecordedArithmetic]:
    """With which arithmetics workers joined, in order; those of the line are the first one's."""
    if not has_table(database, "arithmetics"):
        return []
    return [
        RecordedArithmetic(worker, node_id, in_order(json.loads(items)), step, at)
        for worker, node_id, items, step, at in database.execute(
            "SELECT worker, node_id, items, step, at FROM arithmetics ORDER BY rowid"
        )
    ]


# --------------------------------------------------------------------------- rows to values


def record_of(row: sqlite3.Row) -> Record:
    """The record of a row."""
    kind = row["kind"]
    return Record(
        key=key_of(row["key"]),
        parent=None if row["parent"] is None else key_of(row["parent"]),
        # Journals from before the first release call the INITIAL record FOUND.
        kind=RecordKind.INITIAL if kind == "FOUND" else RecordKind[kind],
        step=row["step"],
        cursor=Cursor(row["epoch"], row["position"], quorum_of(_quorum(row))[0]),
        roster=tuple(json.loads(row["roster"])),
    )


def _quorum(row: sqlite3.Row) -> str | None:
    # A journal that was written before this column was there is only read.
    return row["quorum"] if "quorum" in row.keys() else None  # noqa: SIM118 (a row is no dict)


def result_of(row: sqlite3.Row, contributions: tuple[StepContribution, ...]) -> StepResult:
    """The result of a STEP's row."""
    _, _, change_scale, late = quorum_of(_quorum(row))
    if late:
        contributions = tuple(
            replace(part, late=late.get(part.worker, 0)) for part in contributions
        )
    return StepResult(
        epoch=row["batch_epoch"],
        batch=PositionRange(row["batch_start"], row["batch_stop"]),
        loss=math.nan if row["loss"] is None else row["loss"],
        samples=row["samples"],
        weight=row["weight"],
        attempt=row["attempt"],
        seconds=row["seconds"],
        contributions=contributions,
        stop_reason=row["stop_reason"],
        correct=row["correct"],
        gradient_norm=row["gradient_norm"],
        # A journal that was written before this column was there is only read.
        overflow="overflow" in row.keys() and bool(row["overflow"]),  # noqa: SIM118 (a row is no dict)
        gradient_scale=_scale_of(row),
        change_scale=change_scale,
        trimmed=row["trimmed"] if "trimmed" in row.keys() else None,  # noqa: SIM118 (likewise)
    )


def _scale_of(row: sqlite3.Row) -> float:
    if "gradient_scale" not in row.keys() or row["gradient_scale"] is None:  # noqa: SIM118
        return 1.0
    scale: float = row["gradient_scale"]
    return scale


def save_spike(database: sqlite3.Connection, made: SpikeDecision, at_unix_s: float) -> None:
    """Saves what the line did by itself about a spike."""
    database.execute(
        f"INSERT INTO spikes VALUES (?, ?, ?, ?, ?, {LAST_RECORD}, ?)",
        (made.step, made.action.name, made.worker, made.scale, made.what, at_unix_s),
    )


def spikes(database: sqlite3.Connection) -> tuple[SpikeDecision, ...]:
    """What the line did by itself about spikes, first to last."""
    if not has_table(database, "spikes"):
        return ()
    found = database.execute(
        "SELECT step, action, worker, scale, text FROM spikes ORDER BY rowid DESC LIMIT 2000"
    ).fetchall()
    return tuple(
        SpikeDecision(
            step=row["step"],
            action=SpikeAction[row["action"]],
            worker=row["worker"],
            scale=row["scale"],
            what=row["text"],
        )
        for row in reversed(found)
    )


def skip_of(row: sqlite3.Row) -> Skip | None:
    """What the MARK of a row skipped; None if it skipped nothing."""
    if row["halt"] is None:
        return None
    positions = PositionRange(row["batch_start"], row["batch_stop"])
    text = _quorum(row)
    return Skip(
        row["batch_epoch"],
        positions,
        u64_of(row["halt"]),
        row["operator"],
        quorum_of(text)[1],
        earlier_of(text),
    )


def contribution_of(row: sqlite3.Row, batch_start: int) -> StepContribution:
    """The contribution of a row, to a step whose batch starts there."""
    return StepContribution(
        worker=row["worker"],
        rank=row["rank"],
        positions=ranges_of(row["ranges"], batch_start),
        samples=row["samples"],
        weight=row["weight"],
        loss_sum=math.nan if row["loss_sum"] is None else row["loss_sum"],
    )
