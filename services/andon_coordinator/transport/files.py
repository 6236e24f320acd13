"""The journal's files: opening them to read, and noticing that somebody replaced them.

SQLite writes to the files that it has open. If somebody deletes them, moves them or puts others in
their place, it goes on writing to files that nobody will ever find, without an error.

Readers and writers of a journal share an index of its write-ahead log, a file beside it. Without
the index and with a full disk, SQLite can't even read. But then nobody else has the journal open,
because an open journal has its index. So a journal without a log is read as a file that nobody
changes. For a journal with a log, both files are copied and the copy is read.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["FilesChanged", "JournalFiles", "open_to_read"]


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection to the journal at `path` that never writes; its rows have named columns.

    Raises:
        sqlite3.Error: neither it nor a copy can be read.
        OSError: a copy can't be made.
    """
    try:
        return _connect(path, "mode=ro")
    except sqlite3.OperationalError:
        log = _log_of(path)
        if not log.exists() or not log.stat().st_size:
            return _connect(path, "mode=ro&immutable=1")
        # The copy is kept in memory, so that the folder can be removed at once.
        with tempfile.TemporaryDirectory(prefix="andon-") as folder:
            for each in (path, log):
                shutil.copy(each, folder)
            copy = sqlite3.connect(Path(folder) / path.name)
            try:
                held = sqlite3.connect(":memory:")
                held.row_factory = sqlite3.Row
                copy.backup(held)
            finally:
                copy.close()
            return held


def _connect(path: Path, how: str) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    database.row_factory = sqlite3.Row
    try:
        # Connecting reads nothing, so a journal that can't be read would show only later.
        database.execute("PRAGMA user_version")
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except BaseException:
        database.close()
        raise
    return database


def _log_of(database: Path) -> Path:
    return database.with_name(database.name + "-wal")


class FilesChanged(Exception):
    """The journal's files were deleted, replaced or truncated, or can't be looked at."""


class JournalFiles:
    """A database and its write-ahead log, as they were at the last check."""

    def __init__(self, database: Path) -> None:
        """Remembers the identity and size of both files, which SQLite has open.

        Raises:
            FilesChanged: one of them is gone, or can't be looked at.
        """
        self._paths = (database, _log_of(database))
        self._seen = self._look()

    def check(self) -> None:
        """Checks that SQLite writes to the files at these paths, and that neither was truncated.

        Raises:
            FilesChanged: says what happened to which file, and the remedy.
        """
        found = self._look()
        for path, was, now in zip(self._paths, self._seen, found, strict=True):
            if (was.st_dev, was.st_ino) != (now.st_dev, now.st_ino):
                raise _changed(path, "put another file in the place of")
        database, log = zip(self._seen, found, strict=True)
        # A database with a log never shrinks. The log shrinks if another program empties it by a
        # checkpoint; that changes the database.
        checkpoint = database[0].st_mtime_ns != database[1].st_mtime_ns
        for path, (was, now), may_shrink in zip(
            self._paths, (database, log), (False, checkpoint), strict=True
        ):
            if now.st_size < was.st_size and not may_shrink:
                raise _changed(path, f"cut {was.st_size - now.st_size} bytes off")
        # Only after all checks: what is wrong now is found by the next check, too.
        self._seen = found

    def note(self) -> None:
        """Notes how large the files are now; never fails. What is wrong, the next check says."""
        with suppress(FilesChanged):
            self.check()

    def _look(self) -> tuple[os.stat_result, ...]:
        found = []
        for path in self._paths:
            try:
                found.append(path.stat())
            except (FileNotFoundError, NotADirectoryError):
                raise _changed(path, "deleted or moved") from None
            except OSError as error:  # Such as a network's file system that went away.
                raise FilesChanged(
                    f"{path} can't be looked at: {error.strerror}. Mend its file system or the "
                    "permissions of its folders, then try again"
                ) from error
        return tuple(found)


def _changed(path: Path, what: str) -> FilesChanged:
    return FilesChanged(
        f"somebody {what} {path} while this process was using it. Stop the service and start it "
        "again: it continues from what its workers hold, with a journal that lacks what is gone"
    )
