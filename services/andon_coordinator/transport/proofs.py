"""Proofs: what the journal keeps of weights, attestations and verdicts.

With them a reader can say of each step that was verified what was computed, and by whom. All of
these are later tables: an older journal gets them when it is opened for writing, and a reader finds
nothing in one that lacks them.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from andon_coordinator.core.effects import SaveRecord, SaveVerdict
from andon_coordinator.core.verification import VerifiedTotals
from andon_coordinator.transport.rows import LAST_RECORD, find, has_column, has_table
from andon_coordinator.transport.schema import key_blob

__all__ = [
    "RecordedVerdict",
    "parent_row",
    "prepare",
    "save_proved",
    "save_verdict",
    "verdicts",
    "verified_totals",
    "verify_key",
]

_TABLES = (
    """
CREATE TABLE IF NOT EXISTS weights (
    step INTEGER NOT NULL,              -- steps committed at the head whose weights these are
    sha256 TEXT NOT NULL,               -- hexadecimal; all workers that gave one gave this
    record INTEGER NOT NULL,            -- that head; 0 if this journal lacks it
    at REAL NOT NULL,
    base_hashed INTEGER NOT NULL,       -- 1: with hashes of frozen parameters in their place
    prefixes BLOB                       -- its running value after each component; NULL: not known
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS attested (
    record INTEGER NOT NULL,            -- the verified round's
    first INTEGER NOT NULL,             -- the node's first grain
    grains INTEGER NOT NULL,
    worker INTEGER NOT NULL,
    digest TEXT NOT NULL,               -- hexadecimal
    samples TEXT NOT NULL,              -- likewise; empty for a node of several grains
    components BLOB,                    -- the hash of each component; NULL: nobody asked for them
    PRIMARY KEY (record, first, grains, worker)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS averages (
    record INTEGER PRIMARY KEY,
    digest TEXT NOT NULL,               -- hexadecimal
    drawn INTEGER NOT NULL,             -- 1: the step was verified as a whole
    alike INTEGER NOT NULL              -- grains that two workers computed alike
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS verdicts (
    step INTEGER NOT NULL,
    key BLOB NOT NULL,
    worker INTEGER,                     -- NULL: nobody is convicted
    text TEXT NOT NULL,
    evidence TEXT NOT NULL,             -- JSON: what each process attested
    record INTEGER NOT NULL,
    at REAL NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS verification (   -- one row at most
    id INTEGER PRIMARY KEY CHECK (id = 0),
    key BLOB NOT NULL                   -- says which steps are drawn; workers must not know it
) STRICT
""",
)
"""One table each."""

_LATER = (("weights", "prefixes"), ("attested", "components"))
"""Columns that journals of this version got later."""


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """What an inquest came to."""

    step: int
    worker: int | None
    """Who was convicted; None: nobody."""
    text: str
    at_unix_s: float


def prepare(database: sqlite3.Connection) -> None:
    """Makes the tables, and the columns that an older journal lacks."""
    for table in _TABLES:
        database.execute(table)
    for table, column in _LATER:
        if not has_column(database, table, column):
            database.execute(f"ALTER TABLE {table} ADD COLUMN {column} BLOB")


def save_proved(
    database: sqlite3.Connection, effect: SaveRecord, row: int, parent: int, at: float
) -> None:
    """Saves what a record's round has shown.

    Args:
        database: the journal, in a transaction.
        effect: the record.
        row: its number.
        parent: that of its parent; 0 if the journal lacks it.
        at: the time, in seconds since the Unix epoch.
    """
    proved = effect.proved
    if proved is None:
        return
    if proved.weights:
        database.execute(
            "INSERT INTO weights (step, sha256, record, at, base_hashed, prefixes)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                *(effect.record.step - 1, proved.weights.hex(), parent, at, proved.base_hashed),
                proved.prefixes or None,
            ),
        )
    if not proved.attested:
        return
    database.executemany(
        # A grain that a worker both owns and verifies is there twice, and both are alike.
        "INSERT OR REPLACE INTO attested (record, first, grains, worker, digest, samples,"
        " components) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(row, it.node.first, len(it.node), worker),
                *(it.digest.hex(), it.samples.hex(), it.components or None),
            )
            for worker, it in proved.attested
        ],
    )
    database.execute(
        "INSERT INTO averages VALUES (?, ?, ?, ?)",
        (row, proved.averages.hex(), proved.drawn, proved.grains),
    )


def parent_row(database: sqlite3.Connection, effect: SaveRecord) -> int:
    """The number of a record's parent; 0 if the journal lacks it."""
    parent = effect.record.parent
    row = None if parent is None else find(database, parent)
    return 0 if row is None else int(row["id"])


def save_verdict(database: sqlite3.Connection, effect: SaveVerdict, at: float) -> None:
    """Saves what an inquest came to."""
    database.execute(
        f"INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, {LAST_RECORD}, ?)",
        (effect.step, key_blob(effect.key), effect.worker, effect.text, effect.evidence, at),
    )


def verdicts(database: sqlite3.Connection) -> list[RecordedVerdict]:
    """Every verdict, first to last."""
    if not has_table(database, "verdicts"):
        return []
    rows = database.execute("SELECT step, worker, text, at FROM verdicts ORDER BY rowid")
    return [RecordedVerdict(*row) for row in rows]


def verified_totals(database: sqlite3.Connection) -> VerifiedTotals:
    """How much was verified, as far as this journal knows."""
    if not has_table(database, "averages") or not has_table(database, "verdicts"):
        return VerifiedTotals()
    one = database.execute
    steps, grains = one(
        "SELECT count(*), coalesce(sum(alike), 0) FROM averages WHERE drawn AND alike"
    ).fetchone()
    # One inquest may have convicted several.
    inquests = one("SELECT count(DISTINCT key) FROM verdicts").fetchone()[0]
    convicted = one("SELECT worker FROM verdicts WHERE worker IS NOT NULL ORDER BY rowid")
    return VerifiedTotals(
        steps=steps, grains=grains, differences=inquests, convicted=[row[0] for row in convicted]
    )


def verify_key(database: sqlite3.Connection, new: bytes) -> bytes:
    """The key that says which steps are drawn: a coordinator that starts again draws the same.

    Args:
        database: the journal, in a transaction.
        new: the key of a journal that has none yet.
    """
    database.execute("INSERT OR IGNORE INTO verification VALUES (0, ?)", (new,))
    key: bytes = database.execute("SELECT key FROM verification").fetchone()[0]
    return bytes(key)
