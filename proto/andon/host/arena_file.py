"""Files of shared memory: how they are made, and how they go.

A file's name goes as early as possible: once all have mapped it. Until then the file is locked for
as long as its maker lives. So a process that starts later can tell what a dead one left behind from
what is in use, in whatever container either runs.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from andon.host.arena import (
    FILE_PREFIX,
    NONCE_BYTES,
    NONCE_OFFSET,
    SharedMemoryUnavailable,
    socket_of,
)
from andon.protocol.messages import SharedMemoryOffer

__all__ = ["ArenaFile", "EmptyFile", "sweep"]

_MIB = 2**20


class _NamedFile:
    """A file of the folder, 0600, locked while this lives; its names go when this is freed."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._name: weakref.finalize[[list[Path]], _NamedFile] | None = None
        """Unlinks the file: when it is called, when this is freed, or when the process exits."""

    @property
    def path(self) -> Path:
        """The file, while it is named."""
        return self._paths[0]

    @property
    def named(self) -> bool:
        """Whether it can still be opened."""
        return self._name is not None and self._name.alive

    def _link(self, name: str) -> None:
        """Gives the file one more name. Unlike a rename, this never replaces a file."""
        path = self.path.with_name(name)
        os.link(self.path, path)
        self._paths.append(path)

    def _unlink_first(self) -> None:
        self._paths.pop(0).unlink(missing_ok=True)

    def unlink(self) -> None:
        """Removes the name; the memory stays for those who have mapped it. May be called again."""
        if self._name is not None:
            self._name()

    def _create(self, folder: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = folder / (FILE_PREFIX + secrets.token_hex(16))
            descriptor = os.open(path, flags, 0o600)
            self._paths[:] = [path]
            self._name = weakref.finalize(self, _remove_all, self._paths)
            try:
                # Whatever the umask is.
                os.fchmod(descriptor, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between open and lock another process's `sweep` may have removed the file. Once it
                # is locked, no sweep touches it.
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BlockingIOError:
                pass  # a sweep holds the lock, and is removing it
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


class ArenaFile(_NamedFile):
    """Memory of `size_bytes`, all of it allocated, in a file of the folder that others may open."""

    def __init__(self, folder: Path, size_bytes: int, *, nonce: bytes | None = None) -> None:
        """Makes the file and maps it. The nonce is random unless it is given.

        Raises:
            SharedMemoryUnavailable: there is no room for it, or the folder can't be used.
        """
        super().__init__()
        try:
            descriptor = self._create(folder)
            try:
                _require_room(folder, size_bytes)
                # Else a full folder would be a SIGBUS at some later write.
                os.posix_fallocate(descriptor, 0, size_bytes)
                self.memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                # The mapping has a descriptor of its own, which keeps the lock.
                os.close(descriptor)
        except OSError as error:
            self.unlink()
            raise SharedMemoryUnavailable(_why(folder, size_bytes, error)) from None
        self.nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        self.memory[NONCE_OFFSET : NONCE_OFFSET + NONCE_BYTES] = self.nonce

    @property
    def offer(self) -> SharedMemoryOffer:
        """The offer for a worker, while the file is still named."""
        assert self.named, "a file is offered before it is unlinked"
        return SharedMemoryOffer(self.path.name, len(self.memory), NONCE_OFFSET)

    def rename(self, names: Sequence[str]) -> None:
        """Gives the file these names in place of the one that it has.

        Whoever finds one of them finds all that was written before.

        Raises:
            SharedMemoryUnavailable: a name is taken, or can't be given. The file has none then.
        """
        try:
            for name in names:
                self._link(name)
        except OSError as error:
            self.unlink()
            raise SharedMemoryUnavailable(
                f"a file in {self.path.parent} can't be named ({error.strerror})"
            ) from None
        self._unlink_first()


class EmptyFile(_NamedFile):
    """An empty file in the place of memory: it tells who looks for it that there is none."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Makes the file, with those of the names that are not taken.

        Raises:
            SharedMemoryUnavailable: the folder can't be used.
        """
        super().__init__()
        try:
            self._close = weakref.finalize(self, os.close, self._create(folder))
            for name in names:
                with suppress(FileExistsError):
                    self._link(name)
        except OSError as error:
            self.unlink()
            raise SharedMemoryUnavailable(_why(folder, 0, error)) from None
        self._unlink_first()


def sweep(folder: Path) -> int:
    """Removes what dead processes of this user left in the folder. Returns the number of files."""
    swept = 0
    try:
        names = [entry for entry in folder.iterdir() if entry.name.startswith(FILE_PREFIX)]
    except OSError:
        return 0
    for path in names:
        try:
            # Neither a link nor a pipe that somebody put there may be followed, or waited for.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # gone, or not this user's
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
                swept += 1
        except OSError:
            pass  # its maker lives
        finally:
            os.close(descriptor)
    return swept


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        _remove(path)


def _remove(path: Path) -> None:
    # The socket first: what dies in between leaves a file, which a later `sweep` finds.
    socket_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _require_room(folder: Path, size_bytes: int) -> None:
    """Fails before anything is allocated: a file that is too large would fill the folder first."""
    found = os.statvfs(folder)
    if size_bytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(folder: Path, size_bytes: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        free = os.statvfs(folder)
        return (
            f"{folder} has {free.f_bavail * free.f_frsize // _MIB} MiB free and one arena needs "
            f"{-(-size_bytes // _MIB)} MiB: enlarge it, or set ANDON_SHARED_DIR to a larger tmpfs"
        )
    return (
        f"{folder} can't be used for shared memory ({error.strerror}): set ANDON_SHARED_DIR to a "
        "folder on tmpfs that this user may write to"
    )
