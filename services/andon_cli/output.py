"""Output: what processes of a run write, read to its end whatever becomes of log and terminal.

A process blocks once nobody reads its pipe, and a worker that blocks stops the line. So no error of
a log or of the terminal, such as a full disk, ever ends the reading: what can't be written is left
out, which is said once.
"""

from __future__ import annotations

import os
import sys
from asyncio import StreamReader
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

__all__ = ["OutputLog", "RunOutput", "pass_on"]

_PIECE = 64 * 2**10


class OutputLog:
    """A file at whose end a process's output is kept, as far as there is room for it."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """Makes the file; `tell` hears, once, why something is missing there."""
        self._path = path
        self._tell = tell
        self._file: IO[bytes] | None = None
        self._missing = 0
        """Bytes that were left out since the last one that is in the file."""
        self._told = False
        self.write(b"")

    def __str__(self) -> str:
        """Where it is."""
        return str(self._path)

    def write(self, piece: bytes) -> None:
        """Appends a piece; after a gap, first how much is missing. Never raises OSError."""
        note = b"\n[andon: %d bytes are missing here]\n" % self._missing if self._missing else b""
        rest = memoryview(note + piece)
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._missing = 0
        except OSError as error:
            noted = len(rest) <= len(piece)
            self._missing = len(rest) if noted else self._missing + len(piece)
            if not self._told:
                self._told = True
                self._tell(f"{self._path} can't be written ({error.strerror}): it lacks output")

    def close(self) -> None:
        """Closes the file; what a file system reports only now is lost."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


class RunOutput:
    """Standard output for a console of rich: what can't be written there is left out.

    A reader who went away is another matter: `BrokenPipeError` is raised.
    """

    def __init__(self, file: TextIO) -> None:
        """Writes past the buffer of `file`: what stays in there would fail again at exit."""
        self._file = file
        self._told = False

    def write(self, text: str) -> int:
        """Writes all of it, or as much as can be; never raises another OSError."""
        data = text.encode(self._file.encoding, errors="replace")
        try:
            while data:
                data = data[os.write(self._file.fileno(), data) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._told:
                self._told = True
                with suppress(OSError):
                    sys.stderr.write(
                        f"andon: the output can't be written ({error.strerror}): the run goes on\n"
                    )
                    sys.stderr.flush()
        return len(text)

    def flush(self) -> None:
        """Has nothing to do."""

    def __getattr__(self, name: str) -> Any:
        """Whatever else the file can: `isatty`, `fileno`, `encoding`."""
        return getattr(self._file, name)


async def pass_on(
    output: StreamReader, show: Callable[[str], None], log: OutputLog | None = None
) -> None:
    """Gives `show` each line of a process until its end, and `log` all its bytes."""
    rest = b""
    try:
        while piece := await output.read(_PIECE):
            if log is not None:
                log.write(piece)
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _PIECE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                show(_readable(line))
        if rest:
            show(_readable(rest))
    finally:
        if log is not None:
            log.close()


def _readable(line: bytes) -> str:
    """One line as text; of a line that was overwritten with carriage returns, the last state."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rpartition("\r")[2]
