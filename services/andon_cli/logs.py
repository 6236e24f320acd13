"""Logs of the service: all of it in its run directory, and on stderr for who looks on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["logging_to"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@contextmanager
def logging_to(path: Path | None, *, quiet: bool) -> Iterator[None]:
    """Sends logs to a file, if any, and to stderr: warnings only if `quiet`, for a launcher."""
    terminal = logging.StreamHandler()
    targets: list[logging.Handler] = [terminal]
    if path is not None:
        targets.append(logging.FileHandler(path, encoding="utf-8"))
    terminal.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for target in targets:
        target.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(target)
    try:
        yield
    finally:
        for target in targets:
            root.removeHandler(target)
            target.close()
        root.setLevel(level)
