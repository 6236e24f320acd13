"""Output: the last lines of workers that `andon run` started, from the logs that it writes."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from andon_server.runs import worker_log

__all__ = ["last_lines"]

_LINES = 50
_BYTES = 64 << 10
_LONGEST = 2000
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


def last_lines(run_dir: Path, worker: int) -> list[str] | None:
    """The last lines of a worker's output, as plain text; None: it has no log in this folder.

    Only a plain file that is really there is read: a log may be a link to anywhere, if somebody
    else may write to the folder.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(worker_log(run_dir, worker), flags), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                return None
            file.seek(max(0, about.st_size - _BYTES))
            data = file.read(_BYTES)
    except OSError:
        return None
    lines = data.decode("utf-8", errors="replace").split("\n")
    if about.st_size > _BYTES:
        del lines[0]  # Its beginning was not read.
    if not lines[-1:] or not lines[-1]:
        del lines[-1:]
    return [_plain(line) for line in lines[-_LINES:]]


def _plain(line: str) -> str:
    """A line without what a terminal obeys; of a progress bar, its last state."""
    text = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2])[:_LONGEST]
    return "".join(each for each in text.expandtabs(4) if each.isprintable())
