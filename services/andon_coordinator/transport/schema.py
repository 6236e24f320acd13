"""The journal's tables, and how values that SQLite does not know are stored in them.

SQLite's integers are signed; terms, rounds and halt ids are unsigned 64-bit numbers. A term or a
halt id is stored as text of 16 hexadecimal digits. Keys are stored in the compact form, because
each step has two: 16 bytes, term and then round, each big-endian. Texts and bytes sort like the
numbers.

Each record is newer than all before it, so `id`, which counts the records, has the order of the
keys: the last record is the one with the greatest id, and keys need no index. `totals` has what a
coordinator needs when it starts. It is updated with each record, so that nothing has to be counted
by reading all of them.

Halts, answers and departures name the last record before them (`record`; 0: there was none). So the
order of events is given by records. Times are for people only: clocks are sometimes set back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import Ranges

__all__ = [
    "ARITHMETICS",
    "BARRED",
    "COSTS",
    "EVICTIONS",
    "LATER_COLUMNS",
    "PACING",
    "RESUMED",
    "RUN_EVENTS",
    "SCALARS",
    "SCHEMA",
    "SESSIONS",
    "SLOWNESS",
    "SPIKES",
    "SPIKE_STATE",
    "STEERED",
    "VERSION",
    "compact_json",
    "earlier_of",
    "evidence_of",
    "evidence_text",
    "key_blob",
    "key_of",
    "layout_of",
    "layout_text",
    "plan_of",
    "plan_text",
    "quorum_of",
    "quorum_text",
    "ranges_of",
    "ranges_text",
    "u64_of",
    "u64_text",
]

VERSION = 3
"""The `user_version` of the database file."""

PACING = """
CREATE TABLE IF NOT EXISTS pacing (     -- one row at most
    id INTEGER PRIMARY KEY CHECK (id = 0),
    record INTEGER NOT NULL,            -- the record that it was saved with
    state BLOB NOT NULL                 -- what `core.pacing_state` wrote
) STRICT
"""
"""A table that journals of this version got later. Programs that do not know it leave it alone."""

SCALARS = """
CREATE TABLE IF NOT EXISTS scalars (
    name TEXT NOT NULL,
    step INTEGER NOT NULL,              -- steps committed when it was logged
    worker INTEGER NOT NULL,
    value REAL,                         -- NULL for NaN
    at REAL NOT NULL,
    PRIMARY KEY (name, step, worker)
) STRICT, WITHOUT ROWID
"""
"""What scripts logged; likewise a later table."""

RUN_EVENTS = """
CREATE TABLE IF NOT EXISTS run_events (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    worker INTEGER,
    step INTEGER NOT NULL,
    text TEXT NOT NULL,
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""What happened, for people; likewise a later table."""

BARRED = """
CREATE TABLE IF NOT EXISTS barred (
    incarnation TEXT NOT NULL,          -- of a process that a person dropped
    credential TEXT NOT NULL,           -- the name of its own token, empty if it had none
    worker INTEGER NOT NULL,
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""Who may not join again; likewise a later table."""

ARITHMETICS = """
CREATE TABLE IF NOT EXISTS arithmetics (
    worker INTEGER NOT NULL,
    node_id TEXT NOT NULL,
    items TEXT NOT NULL,                -- JSON: {name: value}, what the worker stated
    step INTEGER NOT NULL,              -- steps committed when it joined
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""Arithmetics with which workers joined a line of same bits; likewise a later table."""

SESSIONS = """
CREATE TABLE IF NOT EXISTS sessions (
    key BLOB PRIMARY KEY,
    ranks TEXT NOT NULL,                -- JSON: [[host, device], ...], in order
    at REAL NOT NULL,
    steps INTEGER,                      -- NULL as long as nobody knows how it ended
    cause TEXT,                         -- NULL if all ranks left in order
    culprit INTEGER,
    message TEXT NOT NULL DEFAULT '',
    halt TEXT,                          -- the halt that ended it
    over_at REAL
) STRICT, WITHOUT ROWID
"""
"""Sessions of ranks; likewise a later table."""

STEERED = """
CREATE TABLE IF NOT EXISTS steered (
    step INTEGER NOT NULL,              -- steps committed at the head that it belongs to
    sequence INTEGER NOT NULL,          -- of the scalar all-reduces at that head
    answer TEXT,                        -- JSON, NULL: it and those after it are left out
    record INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (step, sequence, record)
) STRICT, WITHOUT ROWID
"""
"""What scripts decided by, on a line whose steps can be recomputed; likewise a later table."""

SPIKES = """
CREATE TABLE IF NOT EXISTS spikes (
    step INTEGER NOT NULL,              -- the step that was being tried
    action TEXT NOT NULL,               -- what the line did by itself
    worker INTEGER,                     -- whose gradients stood out
    scale REAL NOT NULL,                -- of the averaged gradient
    text TEXT NOT NULL,
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""What the line did about spikes; likewise a later table."""

SLOWNESS = """
CREATE TABLE IF NOT EXISTS slowness (
    worker INTEGER NOT NULL,
    step INTEGER NOT NULL,              -- the step that the others waited in
    phase TEXT NOT NULL,
    late_s REAL NOT NULL,
    text TEXT NOT NULL,                 -- for people
    facts TEXT NOT NULL,                -- JSON: the guilty line, the stacks, the process
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""Why workers were slow, a few an hour; likewise a later table."""
SPIKE_STATE = """
CREATE TABLE IF NOT EXISTS spike_state (   -- one row at most
    id INTEGER PRIMARY KEY CHECK (id = 0),
    record INTEGER NOT NULL,            -- the record that it was saved with
    state BLOB NOT NULL                 -- what `core.comparison` wrote
) STRICT
"""
"""What is remembered of how workers compare; likewise a later table."""

EVICTIONS = """
CREATE TABLE IF NOT EXISTS evictions (
    incarnation TEXT NOT NULL,          -- of a process that was slow for long
    why TEXT NOT NULL,                  -- why it follows, empty: it takes part again
    stand INTEGER NOT NULL,             -- how many are in sync without it
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""Who follows the line and computes nothing; likewise a later table."""

COSTS = """
CREATE TABLE IF NOT EXISTS costs (
    price_per_hour REAL NOT NULL,       -- of one worker's machine
    currency TEXT NOT NULL,
    at REAL NOT NULL
) STRICT
"""
"""What people said of prices, the last row holds; likewise a later table."""

GRADIENT_SCALE = "ALTER TABLE records ADD COLUMN gradient_scale REAL"
"""Adds a column that journals of this version got later, to one that lacks it."""

OVERFLOW = "ALTER TABLE records ADD COLUMN overflow INTEGER"
"""Adds a column that journals of this version got later, to one that lacks it."""

QUORUM = "ALTER TABLE records ADD COLUMN quorum TEXT"
"""Likewise."""

TRIMMED = "ALTER TABLE records ADD COLUMN trimmed INTEGER"
"""Likewise."""

LATER_COLUMNS = (
    ("overflow", OVERFLOW),
    ("gradient_scale", GRADIENT_SCALE),
    ("quorum", QUORUM),
    ("trimmed", TRIMMED),
)
"""Those of records, and what adds them."""

RESUMED = (
    "ALTER TABLE totals ADD COLUMN resumed INTEGER",
    "UPDATE totals SET resumed = rolled_back",
)
"""Likewise; until then both kinds of roll-back were one."""

# The store splits this at each semicolon, so no comment in it may contain one.
SCHEMA = """
CREATE TABLE run (
    run_id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    plan TEXT,              -- JSON, from the first worker that was accepted
    layout TEXT,            -- JSON, likewise
    layout_digest TEXT      -- hexadecimal
) STRICT;
CREATE TABLE terms (
    term TEXT PRIMARY KEY,
    at REAL NOT NULL
) STRICT;
CREATE TABLE records (
    id INTEGER PRIMARY KEY,     -- counts them
    key BLOB NOT NULL,
    parent BLOB,
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,     -- the cursor once the record is applied
    position INTEGER NOT NULL,
    roster TEXT NOT NULL,       -- JSON, in rank order
    batch_epoch INTEGER,        -- what a STEP took, or a MARK skipped
    batch_start INTEGER,
    batch_stop INTEGER,
    halt TEXT,                  -- the halt that a MARK's skip answers (0: the script skipped)
    operator TEXT,              -- who answered it
    loss REAL,                  -- from here to `correct`: of a STEP, NULL for NaN too
    samples INTEGER,
    weight REAL,
    attempt INTEGER,
    seconds REAL,
    stop_reason TEXT,
    correct INTEGER,
    gradient_norm REAL,         -- NULL if the line does not ask for it
    note TEXT NOT NULL,
    at REAL NOT NULL,
    overflow INTEGER,           -- 1 if scaled gradients overflowed, so that no weight moved
    quorum TEXT,                -- JSON, of a line with a quorum: see `quorum_text`
    gradient_scale REAL,        -- what the averaged gradient was multiplied with, NULL for 1
    trimmed INTEGER             -- contributions that its mean left out at each end of each element,
                                -- 0 if they were too few, NULL on a line of weighted means
) STRICT;
CREATE TABLE totals (           -- one row, over all records
    steps INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    most_workers INTEGER NOT NULL,
    rolled_back INTEGER,        -- the record that last rolled the line back
    gaps INTEGER NOT NULL,      -- records whose parent was not there
    gap INTEGER,                -- the last one of them
    resumed INTEGER             -- the record with which a person last resumed the run
) STRICT;
INSERT INTO totals VALUES (0, 0, 0, NULL, 0, NULL, NULL);
CREATE TABLE contributions (
    record INTEGER NOT NULL REFERENCES records (id),
    worker INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    ranges TEXT NOT NULL,       -- JSON: [[start, stop], ...], counted from the batch's start
    samples INTEGER NOT NULL,
    weight REAL NOT NULL,
    loss_sum REAL,
    PRIMARY KEY (record, worker)
) STRICT, WITHOUT ROWID;
CREATE TABLE halts (
    id TEXT PRIMARY KEY,
    reason TEXT NOT NULL,
    step INTEGER NOT NULL,
    worker INTEGER,
    message TEXT NOT NULL,
    evidence TEXT NOT NULL,     -- JSON, all of it
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE answers (
    halt TEXT NOT NULL,
    answer TEXT NOT NULL,
    worker INTEGER,
    operator TEXT NOT NULL,
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE departures (
    worker INTEGER NOT NULL,
    reason TEXT NOT NULL,       -- 'LOST' if it did not leave on purpose, 'DROPPED' if sent away
    message TEXT NOT NULL,
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,       -- hexadecimal, empty if it gave none
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT;
"""


_KEY = struct.Struct(">QQ")

compact_json = json.JSONEncoder(separators=(",", ":")).encode
"""A value as JSON. `json.dumps` with separators would build an encoder each time."""

_EVIDENCE: dict[tuple[str, ...], type] = {
    ("id", "step", "worker", "block", "epoch"): int,
    ("parameter", "value", "message"): str,
}
"""The fields of a halt's evidence that are read as they are."""


def u64_text(number: int) -> str:
    """An unsigned 64-bit number as text whose order is the numbers'."""
    if not 0 <= number < 2**64:
        raise ValueError(f"not an unsigned 64-bit number: {number}")
    return f"{number:016x}"


def u64_of(text: str) -> int:
    """The number that `u64_text` wrote."""
    return int(text, 16)


def key_blob(key: Key) -> bytes:
    """A key as 16 bytes whose order is the keys'."""
    return _KEY.pack(key.term, key.round)


def key_of(blob: bytes) -> Key:
    """The key that `key_blob` wrote."""
    return Key(*_KEY.unpack(blob))


def ranges_text(ranges: Iterable[PositionRange], base: int) -> str:
    """Ranges of positions as JSON, counted from `base`.

    Counted from the start of the batch, they are as short late in an epoch as early.
    """
    counted = [[part.start - base, part.stop - base] for part in ranges]
    return compact_json(counted)


def ranges_of(text: str, base: int) -> tuple[PositionRange, ...]:
    """The ranges that `ranges_text` wrote."""
    return tuple(PositionRange(base + start, base + stop) for start, stop in json.loads(text))


def quorum_text(
    owed: Ranges,
    skipped: Ranges | None,
    change_scale: float | None,
    late: Mapping[int, int],
    earlier: Iterable[tuple[int, PositionRange]] = (),
) -> str | None:
    """What few records have, most of it on a line with a quorum, as JSON; None: it has nothing.

    Args:
        owed: positions before its cursor that are in no record yet.
        skipped: what a MARK skipped, if that is not its batch.
        change_scale: what a STEP's mean change was multiplied with; None without a quorum.
        late: by worker, out of how many records it was left before.
        earlier: what a MARK skipped of epochs before its batch's.
    """
    values = {
        "owed": [[part.start, part.stop] for part in owed] or None,
        "skipped": None if skipped is None else [[part.start, part.stop] for part in skipped],
        "scale": change_scale,
        "late": {str(worker): count for worker, count in late.items()} or None,
        "earlier": [[epoch, part.start, part.stop] for epoch, part in earlier] or None,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return compact_json(given) if given else None


def quorum_of(text: str | None) -> tuple[Ranges, Ranges | None, float | None, dict[int, int]]:
    """What `quorum_text` wrote, but what was skipped of earlier epochs; nothing for None."""
    given = json.loads(text) if text else {}
    owed, skipped = given.get("owed", ()), given.get("skipped")
    return (
        tuple(PositionRange(*part) for part in owed),
        None if skipped is None else tuple(PositionRange(*part) for part in skipped),
        given.get("scale"),
        {int(worker): count for worker, count in given.get("late", {}).items()},
    )


def earlier_of(text: str | None) -> tuple[tuple[int, PositionRange], ...]:
    """What a MARK skipped of earlier epochs, as `quorum_text` wrote it."""
    given = json.loads(text).get("earlier", ()) if text else ()
    return tuple((epoch, PositionRange(start, stop)) for epoch, start, stop in given)


def plan_text(plan: RunPlan) -> str:
    """A run's plan as JSON."""
    return json.dumps(plan.to_json())


def plan_of(text: str) -> RunPlan:
    """The plan that `plan_text` wrote; fields that an older version did not have get defaults."""
    return RunPlan.from_json(json.loads(text))


def layout_text(layout: Layout) -> str:
    """A layout as JSON: blocks of kind, name and components of name, type and shape."""
    return json.dumps(
        [
            {
                "kind": block.kind.name,
                "name": block.name,
                "components": [
                    [part.name, part.dtype.name, list(part.shape)] for part in block.components
                ],
            }
            for block in layout.blocks
        ]
    )


def layout_of(text: str) -> Layout:
    """The layout that `layout_text` wrote."""
    return Layout(
        tuple(
            Block(
                BlockKind[block["kind"]],
                block["name"],
                tuple(
                    Component(name, tuple(shape), DType[dtype])
                    for name, dtype, shape in block["components"]
                ),
            )
            for block in json.loads(text)
        )
    )


def evidence_text(evidence: HaltEvidence) -> str:
    """A halt's evidence as JSON."""
    # Left out if there is none: older programs read such journals, and do not know the field.
    reporter = {} if evidence.reported_by is None else {"reported_by": evidence.reported_by}
    return json.dumps(
        {
            "id": evidence.id,
            "reason": evidence.reason.name,
            "step": evidence.step,
            "key": None if evidence.key is None else key_blob(evidence.key).hex(),
            "worker": evidence.worker,
            "block": evidence.block,
            "parameter": evidence.parameter,
            "element": list(evidence.element),
            "value": evidence.value,
            "message": evidence.message,
            "at_unix_s": evidence.at_unix_s,
            "epoch": evidence.epoch,
            "positions": (
                None
                if evidence.positions is None
                else [evidence.positions.start, evidence.positions.stop]
            ),
        }
        | reporter
    )


def evidence_of(text: str) -> HaltEvidence:
    """The evidence that `evidence_text` wrote."""
    fields = json.loads(text)
    fields["reason"] = HaltReason[fields["reason"]]
    fields["key"] = None if fields["key"] is None else key_of(bytes.fromhex(fields["key"]))
    fields["element"] = tuple(map(int, fields["element"]))
    if (positions := fields.get("positions")) is not None:
        fields["positions"] = PositionRange(*positions)
    for names, kind in _EVIDENCE.items():
        if not all(isinstance(fields.get(name), kind | None) for name in names):
            raise TypeError(f"one of {', '.join(names)} is no {kind.__name__}")
    return HaltEvidence(**fields)
