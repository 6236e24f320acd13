"""Damage: reading a journal that holds what no coordinator wrote ends soon, and with one error.

A journal may lie on a bad disk, or come from somebody else. SQLite reads any database: also one in
which a table is a view whose rows never end, or whose pages lead to each other again and again.
Three things keep a reader safe:

- what is no plain table is refused before anything is read from it;
- the work is bounded by the size of the file (`limit_work`);
- whatever reading raises becomes a `JournalError` that names the file (`journal_errors`).
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from andon.host.errors import CommandError

__all__ = ["JournalError", "check_tables", "journal_errors", "limit_work"]

_DAMAGE = (
    sqlite3.Error, struct.error, ValueError, LookupError, TypeError, AttributeError,
    ArithmeticError, AssertionError, RecursionError,
)  # fmt: skip
"""What reading raises if rows are not those that a coordinator writes."""

_CALL_EVERY = 100_000
"""Instructions of SQLite's virtual machine between two looks at the bound."""
_LEAST_WORK = 20_000_000
"""Instructions that reading any journal may take; about a second."""
_WORK_PER_BYTE = 64
"""More for each byte of the file. A command needs about 4: a step takes 280 bytes."""
_LONGEST_VALUE = 256 << 20
"""Bytes of one value. The layout of a large model has some megabytes."""

_NO_TABLES = """
SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR rootpage = 0
UNION ALL
SELECT tables.name FROM sqlite_master AS tables, pragma_table_xinfo(tables.name) AS columns
WHERE tables.type = 'table' AND tables.rootpage > 0 AND columns.hidden <> 0
LIMIT 1
"""
"""What is computed when it is read: views, virtual tables, generated columns. And triggers."""


class JournalError(CommandError):
    """The journal can't be used, or can't take a change."""


def check_tables(database: sqlite3.Connection, path: Path) -> None:
    """Checks that a journal holds nothing but plain tables and their indices.

    Raises:
        JournalError: something else is in it.
        sqlite3.Error: it can't be read.
    """
    # Before anything is read: a value that is too long is then an error, and takes no memory.
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    found = database.execute(_NO_TABLES).fetchone()
    if found is not None:
        raise JournalError(
            f"the journal {path} can't be read: its {found[0]!r:.60} is no table that a "
            "coordinator made. Put a copy in its place, or move it away"
        )


def limit_work(database: sqlite3.Connection, path: Path) -> None:
    """Ends what reads a journal once it has read far more than a file of its size can hold."""
    size = sum(each.stat().st_size for each in (path, _log_of(path)) if each.exists())
    left = (_LEAST_WORK + size * _WORK_PER_BYTE) // _CALL_EVERY

    def is_too_much() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    database.set_progress_handler(is_too_much, _CALL_EVERY)


@contextmanager
def journal_errors(path: Path) -> Iterator[None]:
    """Turns whatever reading the journal at `path` raises into a JournalError.

    Raises:
        JournalError: the journal is damaged, or can't be read.
    """
    try:
        yield
    except sqlite3.Error as error:
        endless = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
        why = "reading it does not end: was it edited?" if endless else error
        raise JournalError(f"the journal {path} can't be read: {why}") from error
    except _DAMAGE as error:
        raise JournalError(
            f"the journal {path} can't be read: it holds what no coordinator wrote "
            f"({error!r:.200}): was it edited?"
        ) from error


def _log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")
