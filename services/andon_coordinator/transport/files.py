"""The journal's files: whether they are still those that were opened.

SQLite writes to the files that it has open. If somebody deletes them, moves them or puts others in
their place, it goes on writing to files that nobody will ever find, and says nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FilesChanged", "JournalFiles"]


class FilesChanged(Exception):
    """The journal is not where it was, or not what it was."""


class JournalFiles:
    """A database and its write-ahead log, as they were seen last."""

    def __init__(self, database: Path) -> None:
        """Notes what is there; both files are open.

        Raises:
            FilesChanged: one is not there any more.
        """
        self._paths = (database, database.with_name(database.name + "-wal"))
        self._seen = self._look()

    def check(self) -> None:
        """Looks whether what was written is where it will be looked for.

        Raises:
            FilesChanged: it is not; says what happened to which file, and what helps.
        """
        found = self._look()
        for path, was, now in zip(self._paths, self._seen, found, strict=True):
            if (was.st_dev, was.st_ino) != (now.st_dev, now.st_ino):
                raise _changed(path, "put another file in the place of")
        database, log = zip(self._seen, found, strict=True)
        # A database that keeps a log never shrinks. The log does if another program empties it by
        # a checkpoint, which changes the database.
        checkpoint = database[0].st_mtime_ns != database[1].st_mtime_ns
        for path, (was, now), may in zip(
            self._paths, (database, log), (False, checkpoint), strict=True
        ):
            if now.st_size < was.st_size and not may:
                raise _changed(path, f"cut {was.st_size - now.st_size} bytes off")
        self._seen = found

    def _look(self) -> tuple[os.stat_result, ...]:
        found = []
        for path in self._paths:
            try:
                found.append(path.stat())
            except FileNotFoundError:
                raise _changed(path, "deleted or moved") from None
        return tuple(found)


def _changed(path: Path, what: str) -> FilesChanged:
    return FilesChanged(
        f"somebody {what} {path} while this process kept it. End the service and start it again: "
        "it goes on from what its workers hold, on a journal that lacks what is gone"
    )
