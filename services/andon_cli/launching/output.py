"""Output: reads what the processes of a run write, to the end, even if it can't be kept.

A process blocks once nobody reads its pipe, and a worker that blocks stops the line. So no error of
a log or of the terminal, such as a full disk, may end the reading: what can't be written is left
out, and a message says so once.
"""

from __future__ import annotations

import os
import sys
from asyncio import StreamReader
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from andon.host.private_files import open_private

__all__ = ["OutputLog", "RunOutput", "pass_on"]

_PIECE = 64 * 2**10


class OutputLog:
    """A file to which a process's output is appended, as long as there is room."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """Creates the file. `tell` is called once with the reason if output is missing there."""
        self._path = path
        self._tell = tell
        self._file: IO[bytes] | None = None
        self._missing = 0
        """Bytes that were left out since the last successful write."""
        self._reported = False
        self.write(b"")

    def __str__(self) -> str:
        """The file's path."""
        return str(self._path)

    def write(self, piece: bytes) -> None:
        """Appends a piece, after a gap first a note of what is missing. Never raises OSError."""
        note = b"\n[andon: %d bytes are missing here]\n" % self._missing if self._missing else b""
        rest = memoryview(note + piece)
        try:
            if self._file is None:
                self._file = open(  # noqa: SIM115 - held
                    self._path, "ab", buffering=0, opener=open_private
                )
            # Unbuffered files may write less than they are given.
            while rest:
                rest = rest[self._file.write(rest) :]
            self._missing = 0
        except OSError as error:
            # If the note about the last gap was written, only part of this piece is missing.
            # Else the gap has grown by all of it.
            noted = len(rest) <= len(piece)
            self._missing = len(rest) if noted else self._missing + len(piece)
            if not self._reported:
                self._reported = True
                self._tell(f"{self._path} can't be written ({error.strerror}): it lacks output")

    def close(self) -> None:
        """Closes the file. Errors that the file system reports only now are ignored."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


class RunOutput:
    """Standard output for a console of rich. What can't be written is left out.

    Only `BrokenPipeError` is raised: then nobody reads the output any more.
    """

    def __init__(self, file: TextIO) -> None:
        """Writes past the buffer of `file`, since what stays in it would fail again at exit."""
        self._file = file
        self._reported = False

    def write(self, text: str) -> int:
        """Writes as much as possible. Raises no OSError but BrokenPipeError."""
        data = text.encode(self._file.encoding, errors="replace")
        try:
            while data:
                data = data[os.write(self._file.fileno(), data) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._reported:
                self._reported = True
                with suppress(OSError):
                    sys.stderr.write(
                        f"andon: the output can't be written ({error.strerror}): the run goes on\n"
                    )
                    sys.stderr.flush()
        return len(text)

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file's: `isatty`, `fileno`, `encoding`."""
        return getattr(self._file, name)


async def pass_on(
    output: StreamReader, show: Callable[[str], None], log: OutputLog | None = None
) -> None:
    """Passes each line of a process to `show`, and all its bytes to `log`, until the end."""
    rest = b""
    try:
        while piece := await output.read(_PIECE):
            if log is not None:
                log.write(piece)
            *lines, rest = (rest + piece).split(b"\n")
            # A line without an end must not grow without bound: show it in pieces.
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
    """A line as text. Of a progress bar, which rewrites its line with \\r, only the last state."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rpartition("\r")[2]
