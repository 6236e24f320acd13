"""Opening a journal to read it, also where SQLite can't make the file that readers share.

Theory of operation. Readers and writers of a journal share an index of its write-ahead log, a file
beside it. Where the index is not there and the disk is full, SQLite can't even read. Then nobody
else has the journal open: an open one has its index. Without a log the journal is read as a file
that nobody changes; with one, a copy of both is read.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path

__all__ = ["open_to_read"]


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection to the journal at `path` that never writes.

    Raises:
        sqlite3.Error: it can't be read, nor a copy of it.
        OSError: nor can a copy be made.
    """
    try:
        return _tried(path, "mode=ro")
    except sqlite3.OperationalError:
        log = path.with_name(path.name + "-wal")
        if not log.exists() or not log.stat().st_size:
            return _tried(path, "mode=ro&immutable=1")
        with tempfile.TemporaryDirectory(prefix="andon-") as folder:
            for each in (path, log):
                shutil.copy(each, folder)
            copy = sqlite3.connect(Path(folder) / path.name)
            try:
                held = sqlite3.connect(":memory:")
                copy.backup(held)
            finally:
                copy.close()
            return held


def _tried(path: Path, how: str) -> sqlite3.Connection:
    """A connection that has read from the database: to open one reads nothing."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    try:
        database.execute("PRAGMA user_version")
        database.execute("SELECT count(*) FROM sqlite_master")
    except BaseException:
        database.close()
        raise
    return database
