"""Logs of the service: all of it in its run directory, and on stderr for who looks on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["logging_to"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@contextmanager
def logging_to(path: Path | None, *, quiet: bool) -> Iterator[None]:
    """Sends logs to a file, if any, and to stderr: warnings only if `quiet`, for a launcher."""
    terminal = logging.StreamHandler()
    targets: list[logging.Handler] = [terminal]
    if path is not None:
        targets.append(_LogFile(path, encoding="utf-8"))
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


class _LogFile(logging.FileHandler):
    """A file that may stand on a full disk: says once what is wrong, and the service goes on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """A record could not be written; every other mistake is told as ever."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with suppress(OSError):
                sys.stderr.write(
                    f"{self.baseFilename} can't be written ({error.strerror}): it lacks records\n"
                )

    def close(self) -> None:
        """Closes it; what finds no room even now is lost."""
        with suppress(OSError):
            super().close()
