"""Private files: what a run writes is its owner's alone, from the moment it is there.

A journal, a log or a checkpoint may hold what a script printed, and the weights themselves. So
whatever the umask allows, files get the mode 0600 and folders 0700. The one exception is asked for
with `chmod g+s` on a run's folder, or on one above it: what is made in a folder with the
set-group-ID bit may be read by its group, as such folders are for. A group writes nothing.

Files that are there already keep their modes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["make_folder", "open_private", "write_whole"]


def make_folder(folder: Path) -> None:
    """Makes a folder that only its owner may open, unless it is there.

    Folders above it that are missing are made with the usual modes.

    Raises:
        OSError: it can't be made, or is something else.
    """
    try:
        folder.mkdir(_folder_mode(folder.parent), exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(_folder_mode(folder.parent), exist_ok=True)


def _folder_mode(parent: Path) -> int:
    return 0o750 if _is_for_the_group(parent) else 0o700


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file, and makes it such that only its owner may read it; an `opener` of `open`.

    Raises:
        OSError: it can't be opened.
    """
    mode = 0o600
    if flags & os.O_CREAT and _is_for_the_group(Path(path).parent):
        mode = 0o640
    return os.open(path, flags | os.O_CLOEXEC, mode)


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Writes a text that only its owner may read, as UTF-8, completely or not at all.

    Args:
        path: where; what is there is replaced.
        text: what.
        errors: as `open` has it, for what UTF-8 can't hold.

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    with open(draft, "w", encoding="utf-8", errors=errors, opener=open_private) as file:
        file.write(text)
    draft.replace(path)


def _is_for_the_group(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_ISGID)
    except OSError:  # what is done there next says why
        return False
