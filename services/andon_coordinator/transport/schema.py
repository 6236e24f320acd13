"""The journal's tables, and how values that SQLite lacks are written in them.

SQLite's integers are signed; terms and rounds are unsigned 64-bit numbers. They are kept as text of
fixed width, 16 hexadecimal digits, whose order is that of the numbers: a key is
`term.round`, and the greatest key is the greatest text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from andon.halts import HaltEvidence, HaltReason
from andon.layout import Block, BlockKind, Component, DType, Layout
from andon.records import Key, PositionRange
from andon.terms import RunPlan

__all__ = [
    "SCHEMA",
    "VERSION",
    "evidence_of",
    "evidence_text",
    "key_of",
    "key_text",
    "layout_of",
    "layout_text",
    "plan_of",
    "plan_text",
    "ranges_of",
    "ranges_text",
    "u64_of",
    "u64_text",
]

VERSION = 1
"""The `user_version` of the database file."""

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
    key TEXT PRIMARY KEY,
    parent TEXT,
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,     -- the cursor once the record is applied
    position INTEGER NOT NULL,
    roster TEXT NOT NULL,       -- JSON, in rank order
    batch_epoch INTEGER,        -- what a STEP took, or a MARK skipped
    batch_start INTEGER,
    batch_stop INTEGER,
    halt TEXT,                  -- the halt whose answer a MARK's skip is
    operator TEXT,              -- and whose answer
    loss REAL,                  -- from here to `correct`: of a STEP, NULL for NaN too
    samples INTEGER,
    weight REAL,
    attempt INTEGER,
    seconds REAL,
    stop_reason TEXT,
    correct INTEGER,
    note TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE contributions (
    record TEXT NOT NULL REFERENCES records (key),
    worker INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    ranges TEXT NOT NULL,       -- JSON: [[start, stop], ...] of the batch's epoch
    samples INTEGER NOT NULL,
    weight REAL NOT NULL,
    loss_sum REAL,
    PRIMARY KEY (record, worker)
) STRICT;
CREATE TABLE halts (
    id TEXT PRIMARY KEY,
    reason TEXT NOT NULL,
    step INTEGER NOT NULL,
    worker INTEGER,
    message TEXT NOT NULL,
    evidence TEXT NOT NULL,     -- JSON, all of it
    at REAL NOT NULL
) STRICT;
CREATE TABLE answers (
    halt TEXT NOT NULL,
    answer TEXT NOT NULL,
    worker INTEGER,
    operator TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE TABLE departures (
    worker INTEGER NOT NULL,
    reason TEXT NOT NULL,       -- 'LOST' if it did not leave on purpose
    message TEXT NOT NULL,
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,       -- hexadecimal, empty if it gave none
    at REAL NOT NULL
) STRICT;
"""


def u64_text(number: int) -> str:
    """An unsigned 64-bit number as text whose order is the numbers'."""
    if not 0 <= number < 2**64:
        raise ValueError(f"not an unsigned 64-bit number: {number}")
    return f"{number:016x}"


def u64_of(text: str) -> int:
    """The number that `u64_text` wrote."""
    return int(text, 16)


def key_text(key: Key) -> str:
    """A key as text whose order is the keys'."""
    return f"{u64_text(key.term)}.{u64_text(key.round)}"


def key_of(text: str) -> Key:
    """The key that `key_text` wrote."""
    term, _, number = text.partition(".")
    return Key(u64_of(term), u64_of(number))


def ranges_text(ranges: Iterable[PositionRange]) -> str:
    """Ranges of positions as JSON."""
    return json.dumps([[part.start, part.stop] for part in ranges])


def ranges_of(text: str) -> tuple[PositionRange, ...]:
    """The ranges that `ranges_text` wrote."""
    return tuple(PositionRange(start, stop) for start, stop in json.loads(text))


def plan_text(plan: RunPlan) -> str:
    """A run's plan as JSON."""
    return json.dumps(
        {
            "global_batch": plan.global_batch,
            "dataset_size": plan.dataset_size,
            "seed": plan.seed,
            "total_steps": plan.total_steps,
            "total_epochs": plan.total_epochs,
        }
    )


def plan_of(text: str) -> RunPlan:
    """The plan that `plan_text` wrote."""
    return RunPlan(**json.loads(text))


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
    return json.dumps(
        {
            "id": evidence.id,
            "reason": evidence.reason.name,
            "step": evidence.step,
            "key": None if evidence.key is None else key_text(evidence.key),
            "worker": evidence.worker,
            "block": evidence.block,
            "parameter": evidence.parameter,
            "element": list(evidence.element),
            "value": evidence.value,
            "message": evidence.message,
            "at_unix_s": evidence.at_unix_s,
        }
    )


def evidence_of(text: str) -> HaltEvidence:
    """The evidence that `evidence_text` wrote."""
    fields = json.loads(text)
    fields["reason"] = HaltReason[fields["reason"]]
    fields["key"] = None if fields["key"] is None else key_of(fields["key"])
    fields["element"] = tuple(fields["element"])
    return HaltEvidence(**fields)
