"""Logs of the service: all of it in its run directory, and on stderr for who looks on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["logging_to"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@contextmanager
def logging_to(path: Path, *, quiet: bool) -> Iterator[None]:
    """Sends logs to a file, and to stderr: warnings only if `quiet`, for a launcher shows them."""
    file, terminal = logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler()
    terminal.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for target in (file, terminal):
        target.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(target)
    try:
        yield
    finally:
        for target in (file, terminal):
            root.removeHandler(target)
            target.close()
        root.setLevel(level)
