"""Claims: workers of one host that no launcher numbered agree on who takes which GPU.

Theory of operation. Each GPU has lock files in the folder that the processes of a host share, named
after what the hardware calls the GPU: containers may number the same GPUs differently. A worker
takes a GPU by `flock` on one of its files, and the kernel drops the lock with the process, however
that ends. A GPU's second worker takes its second file, so that the locked files of a GPU count its
workers.

The choice is made under one more lock, for all GPUs, since two workers that count at once would
both find the same GPU free. It is held for microseconds. Files are never removed: whoever waits for
the lock of a removed file would share it with nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["GpuClaims", "claims_of_process"]

_MOST = 64
"""Workers that are told apart on one GPU; those beyond them are not counted."""


class GpuClaims:
    """The GPU that this process has claimed, if any. Used by one thread."""

    def __init__(self) -> None:
        """Claims nothing yet."""
        self._held: int | None = None
        """The descriptor of the locked file."""
        self._gpu = ""
        self._others = 0

    def claim(self, gpus: Sequence[str], folder: Path) -> tuple[int, int]:
        """Takes the GPU that the fewest workers of this host have; the first of several.

        A process claims one GPU: a second call returns the first one's, if it is among `gpus`.

        Args:
            gpus: what the hardware calls each GPU that this process sees; not empty.
            folder: the folder that the processes of this host share.

        Returns:
            The GPU's place in `gpus`, and how many other workers had it already.

        Raises:
            OSError: the folder can't be used.
        """
        if self._held is not None and self._gpu in gpus:
            return gpus.index(self._gpu), self._others
        self.release()
        choosing = _open(folder / "andon-gpus.lock")
        try:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            taken = [_count(gpu, folder) for gpu in gpus]
            place = taken.index(min(taken))
            self._held, self._gpu, self._others = (
                _take(gpus[place], folder),
                gpus[place],
                min(taken),
            )
        finally:
            os.close(choosing)
        return place, self._others

    def release(self) -> None:
        """Gives the GPU back; does nothing if none is claimed."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _forget(self) -> None:
        """In a forked process: the claim is its parent's, and must not outlive that."""
        # Closing a copy of the descriptor leaves the parent's lock as it is.
        self.release()


@cache
def claims_of_process() -> GpuClaims:
    """This process's claim, which lasts until the process ends: so do its tensors on the GPU."""
    claims = GpuClaims()
    os.register_at_fork(after_in_child=claims._forget)
    return claims


def _count(gpu: str, folder: Path) -> int:
    """How many workers have a GPU."""
    count = 0
    for number in range(_MOST):
        try:
            descriptor = os.open(_file(gpu, number, folder), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            break  # They are made in order.
        count += not _lock(descriptor)
        os.close(descriptor)
    return count


def _take(gpu: str, folder: Path) -> int:
    """Locks the first free file of a GPU. Returns its descriptor."""
    for number in range(_MOST):
        descriptor = _open(_file(gpu, number, folder))
        if _lock(descriptor) or number == _MOST - 1:
            break
        os.close(descriptor)
    return descriptor


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file(gpu: str, number: int, folder: Path) -> Path:
    return folder / f"andon-gpu-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}.{number}"


def _open(path: Path) -> int:
    """Opens a file to lock it, and makes it if there is none; other users may lock it, too."""
    # Not O_CREAT at once: where everybody may write, Linux refuses that for another user's file.
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with suppress(FileExistsError):
        made = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        os.fchmod(made, 0o644)  # Whatever the umask.
        return made
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
