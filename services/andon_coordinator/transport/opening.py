"""Opening a journal's database to write: it is made, or brought up to this version's tables."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from andon.host.private_files import open_private
from andon_coordinator.transport import proofs, rows
from andon_coordinator.transport.damage import JournalError, check_tables
from andon_coordinator.transport.files import JournalFiles
from andon_coordinator.transport.schema import (
    ARITHMETICS,
    BARRED,
    COSTS,
    EVICTIONS,
    LATER_COLUMNS,
    PACING,
    RESUMED,
    RUN_EVENTS,
    SCALARS,
    SCHEMA,
    SESSIONS,
    SLOWNESS,
    SPIKE_STATE,
    SPIKES,
    STEERED,
    VERSION,
)

__all__ = ["JournalSync", "open_to_write", "transaction"]

JournalSync = Literal["normal", "full"]
"""`normal` survives the death of any process, `full` also a power failure."""


def open_to_write(path: Path, run_id: str, *, sync: JournalSync, now: float) -> sqlite3.Connection:
    """A connection to a run's journal, which is created if there is none.

    Its rows have named columns, and nothing is committed but by `transaction`.

    Args:
        path: of the database.
        run_id: the run's.
        sync: what a change survives.
        now: the time since the Unix epoch.

    Raises:
        JournalError: it is of another run or version, or damaged.
        sqlite3.Error, OSError: it can't be opened.
    """
    # SQLite would make it readable by everybody. Its log and index get the same mode. A journal
    # that is there is not opened: closing it would drop SQLite's locks on it.
    with suppress(FileExistsError):
        os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    with ExitStack() as undo:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        undo.callback(database.close)
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {sync.upper()}")
        database.execute("PRAGMA foreign_keys = ON")
        _prepare(database, path, run_id, now)
        undo.pop_all()
    return database


@contextmanager
def transaction(database: sqlite3.Connection, files: JournalFiles | None = None) -> Iterator[None]:
    """What is changed within it becomes durable at its end, or nothing of it.

    `files`: those of the database, which are looked at; None: the tables are being created.

    Raises:
        FilesChanged: what was written could not be found again.
    """
    # IMMEDIATE takes the write lock first, so that what is read inside is what is changed.
    database.execute("BEGIN IMMEDIATE")
    try:
        # Checked before the write, which could hide that the file was truncated, and after it, so
        # that nothing is reported durable which nobody can find. Never after COMMIT: what is
        # committed can't be taken back, and reported as failed it would be written again. Files
        # that are taken away during COMMIT are missed by the next transaction, as those are that
        # are taken away right after it.
        if files is not None:
            files.check()
        yield
        if files is not None:
            files.check()
        database.execute("COMMIT")
    except BaseException:
        # After some errors (a full disk is one) SQLite rolls back by itself, and then refuses
        # another ROLLBACK. The first error is the one to report.
        with suppress(sqlite3.Error):
            if database.in_transaction:
                database.execute("ROLLBACK")
        raise
    # After the commit, which may have made the files longer: the next check finds if that is cut
    # off.
    if files is not None:
        files.note()


def _prepare(database: sqlite3.Connection, path: Path, run_id: str, now: float) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        with transaction(database):
            for statement in filter(str.strip, SCHEMA.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("INSERT INTO run (run_id, created_at) VALUES (?, ?)", (run_id, now))
    elif version != VERSION:
        raise JournalError(
            f"the journal {path} has version {version}, this program writes {VERSION}: "
            "use the program that wrote it, or start another run"
        )
    # Before anything else is read: what is no plain table might compute something.
    check_tables(database, path)
    later = (
        PACING,
        SCALARS,
        RUN_EVENTS,
        BARRED,
        ARITHMETICS,
        SESSIONS,
        STEERED,
        SPIKES,
        SLOWNESS,
        SPIKE_STATE,
        COSTS,
        EVICTIONS,
    )
    for table in later:
        database.execute(table)
    missing = (
        adds for column, adds in LATER_COLUMNS if not rows.has_column(database, "records", column)
    )
    for statement in missing:
        database.execute(statement)
    proofs.prepare(database)
    if not rows.has_column(database, "totals", "resumed"):
        with transaction(database):
            for statement in RESUMED:
                database.execute(statement)
    kept = database.execute("SELECT run_id FROM run").fetchone()[0]
    if kept != run_id:
        raise JournalError(f"the journal {path} is of run {kept}, not {run_id}: use its own folder")
    step = rows.out_of_order(database)
    if step is not None:
        raise JournalError(
            f"the journal {path} is damaged: its records are out of order at step "
            f"{step}. Put a copy in its place, or move it away: the line then continues from "
            "what its workers hold, or from a checkpoint"
        )
