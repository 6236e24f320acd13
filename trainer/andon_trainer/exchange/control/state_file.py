"""A file in the shared folder, through which a state goes from one worker of a host to another.

Theory of operation. Over gRPC every byte of a state passes four sockets and three processes, and
the line trains on the same cores. In a file each byte is written once and read once.

The receiver makes the file, empty, and names it as it asks for the state. The reducer passes the
name on. A sender that sees the same folder opens the file, and says piece by piece how much it has
written there. The first such message tells the receiver that the file was opened, and it unlinks
the name. So a file with something in it has no name, and ends with the last of the two processes,
however these end. What has a name is locked, as arenas are: a reducer that starts removes it if its
maker is gone.

Whatever does not fit (another host or user, no room) makes the sender send bytes, in the same call.

Nothing in the file is trusted. The receiver reads it into memory of its own, and what counts is the
SHA-256 of that. It never maps the file, so one that is cut short is an error, and no SIGBUS. The
sender writes to nothing but an empty file of its own user that nobody else may open.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from andon.host.arena import FILE_PREFIX, SharedMemoryUnavailable, folder_identity
from andon.host.memory import available_bytes
from andon_trainer.errors import StateCorrupt

__all__ = ["FILE_PIECE_BYTES", "LEAST_BYTES", "FileWriter", "StateFile"]

LEAST_BYTES = 2**20
"""A state that is smaller goes as bytes: a file would take longer."""

FILE_PIECE_BYTES = 2**23
"""So much is written before the receiver hears of it, and reads it while more is written."""

_READ_BYTES = 2**20
_PART_OF_FREE = 2
"""Of the folder's room a state takes not more than one part in so many: the rest is for arenas."""
_PART_OF_MEMORY = 4
_NAME = re.compile(FILE_PREFIX + r"state-[0-9a-f]{32}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class StateFile:
    """The receiver's end."""

    def __init__(self, folder: Path) -> None:
        """Makes an empty file, 0600.

        Raises:
            SharedMemoryUnavailable: the folder can't be used.
        """
        self.folder = folder_identity(folder)
        """Which folder it is in."""
        self.name = f"{FILE_PREFIX}state-{secrets.token_hex(16)}"
        self._path = folder / self.name
        self._named = True
        # One for all pieces: to get memory from the system costs more than to copy into it.
        self._room = memoryview(bytearray(_READ_BYTES))
        try:
            self._descriptor = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SharedMemoryUnavailable(f"no file for a state ({error.strerror})") from None
        try:
            os.fchmod(self._descriptor, 0o600)  # Whatever the umask is.
            # A reducer that starts removes what is not locked. If it was faster, the sender finds
            # no such file, and sends bytes.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise SharedMemoryUnavailable(f"no file for a state ({error.strerror})") from None

    def unlink(self) -> None:
        """Nobody is to open it any more; a second call does nothing."""
        if self._named:
            self._named = False
            self._path.unlink(missing_ok=True)

    def read(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes, in pieces, as they are now; each is good until the next one.

        Raises:
            StateCorrupt: fewer are there.
        """
        while count:
            size = os.readv(self._descriptor, [self._room[:count]])
            if not size:
                raise StateCorrupt(f"the file of the state ends {count} bytes early")
            count -= size
            yield self._room[:size]

    def close(self) -> None:
        """Lets go of it, and of its name."""
        self.unlink()
        os.close(self._descriptor)


class FileWriter:
    """The sender's end."""

    def __init__(self, folder: Path, identity: bytes, name: str, size_bytes: int) -> None:
        """Opens the receiver's file, to write so much to it.

        Raises:
            SharedMemoryUnavailable: the two don't see one folder, it is no such file, or there is
                no room for that much.
        """
        if _NAME.fullmatch(name) is None:
            raise SharedMemoryUnavailable("the receiver named a file that holds no state")
        if identity != folder_identity(folder):
            raise SharedMemoryUnavailable("the receiver has another folder: it is on another host")
        _require_room(folder, size_bytes)
        try:
            # A link could lead outside the folder, and opening a FIFO would wait for its other end.
            self._descriptor = os.open(folder / name, _FLAGS | os.O_NONBLOCK)
        except OSError as error:
            text = f"the receiver's file can't be opened ({error.strerror})"
            raise SharedMemoryUnavailable(text) from None
        found = os.fstat(self._descriptor)
        # What is written to may be nothing that anybody uses, whatever the receiver says.
        mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        alone = stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 1
        if not (mine and alone and found.st_size == 0):
            self.close()
            raise SharedMemoryUnavailable("the receiver's file is not empty, or not this user's")

    def write(self, data: memoryview) -> bool:
        """Writes the next bytes, all of them; False: there is no room, and nothing more may come.

        What is left of them in the file then is never read.
        """
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._descriptor)


def _require_room(folder: Path, size_bytes: int) -> None:
    """A state must leave room for others, and must not take the memory that they need."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise SharedMemoryUnavailable(f"the folder is gone ({error.strerror})") from None
    free, memory = found.f_bavail * found.f_frsize, available_bytes()
    if size_bytes > free // _PART_OF_FREE or (
        memory is not None and size_bytes > memory // _PART_OF_MEMORY
    ):
        raise SharedMemoryUnavailable("there is no room for the state in the folder")
