"""Pages: the files of the board's page, which the package brings along."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable

__all__ = ["Page", "Pages"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
_OTHER = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A file as it is served."""

    kind: str
    content: bytes = field(repr=False)
    tag: str
    """Changes with the content; quoted, as in the ETag header."""


class Pages:
    """The files by the paths under which they are served.

    The paths are listed once. Only what is in the list is served, so no path leads elsewhere.
    """

    def __init__(self) -> None:
        """Lists the files of the package."""
        found = _files_in(resources.files(__package__) / "static")
        self._files = {f"/board/{name}": file for name, file in found}
        self._files["/"] = self._files["/board/index.html"]

    def page(self, path: str) -> Page | None:
        """What is served there; None if nothing is."""
        file = self._files.get(path)
        if file is None:
            return None
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:32]
        return Page(
            kind=_KINDS.get(f".{file.name.rpartition('.')[2]}", _OTHER),
            content=content,
            tag=f'"{digest}"',
        )


def _files_in(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files_in(each, f"{prefix}{each.name}/")
        else:
            yield f"{prefix}{each.name}", each
