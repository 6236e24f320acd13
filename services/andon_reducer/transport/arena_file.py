"""Arena files: memory under a name that only lives until somebody has mapped it.

A file is locked for as long as its maker lives, so that who starts later can tell what a dead
process left behind from what is in use, in whatever container either runs.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from pathlib import Path

from andon.host.arena import NONCE_BYTES, NONCE_OFFSET, SharedMemoryUnavailable
from andon.protocol.messages import SharedMemoryOffer

__all__ = ["ArenaFile", "sweep"]

_PREFIX = "andon-"
_MIB = 2**20


class Name:
    """A file's name, which goes at the latest when its owner does, or the process exits."""

    def __init__(self, owner: object, path: Path) -> None:
        """`owner` is who keeps the name."""
        self.text = path.name
        self._finalizer = weakref.finalize(owner, _remove, path)

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self._finalizer.alive

    def take_away(self) -> None:
        """Takes it away; a second call does nothing."""
        self._finalizer()


class ArenaFile:
    """Memory of `size_bytes`, all of it there, in a file of the folder that others may open."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Makes the file, 0600, and maps it.

        Raises:
            SharedMemoryUnavailable: there is no room for it, or the folder is of no use.
        """
        self._name: Name | None = None
        try:
            descriptor = self._create(folder)
            try:
                _require_room(folder, size_bytes)
                os.posix_fallocate(descriptor, 0, size_bytes)
                self.memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                # The mapping has a descriptor of its own, which keeps the lock.
                os.close(descriptor)
        except OSError as error:
            self.unlink()
            raise SharedMemoryUnavailable(_why(folder, size_bytes, error)) from None
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.memory[NONCE_OFFSET : NONCE_OFFSET + NONCE_BYTES] = self.nonce

    @property
    def offer(self) -> SharedMemoryOffer:
        """What a worker is told of it. It is named still."""
        assert self._name is not None
        return SharedMemoryOffer(self._name.text, len(self.memory), NONCE_OFFSET)

    @property
    def named(self) -> bool:
        """Whether it can still be opened."""
        return self._name is not None and self._name.alive

    def unlink(self) -> None:
        """Takes the name away; the memory stays for those who have mapped it."""
        if self._name is not None:
            self._name.take_away()

    def _create(self, folder: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = folder / (_PREFIX + secrets.token_hex(16))
            descriptor = os.open(path, flags, 0o600)
            self._name = Name(self, path)
            try:
                os.fchmod(descriptor, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BlockingIOError:
                pass  # somebody who sweeps has it, and takes it away
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def sweep(folder: Path) -> int:
    """Removes what dead processes of this user left in the folder; how many files that were."""
    swept = 0
    try:
        names = [entry for entry in folder.iterdir() if entry.name.startswith(_PREFIX)]
    except OSError:
        return 0
    for path in names:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # gone, or not this user's
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                swept += 1
        except OSError:
            pass  # its maker lives
        finally:
            os.close(descriptor)
    return swept


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _require_room(folder: Path, size_bytes: int) -> None:
    """Refuses what can't be, before others find the folder full for a moment."""
    found = os.statvfs(folder)
    if size_bytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(folder: Path, size_bytes: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        free = os.statvfs(folder)
        return (
            f"{folder} has {free.f_bavail * free.f_frsize // _MIB} MiB free and one arena needs "
            f"{-(-size_bytes // _MIB)} MiB: set shm_size, or ANDON_SHARED_DIR to a larger tmpfs"
        )
    return (
        f"{folder} can't be used by the reducer ({error.strerror}): set ANDON_SHARED_DIR to a "
        "folder on tmpfs that it may write to"
    )
