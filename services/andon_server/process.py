"""Process: signals and logs of a process that serves, or that starts one."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Interrupts", "logging_to"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Interrupts:
    """While it is entered, the first interrupt sets `first`, and any other one `again`."""

    def __init__(self) -> None:
        """Needs a running loop once it is entered."""
        self.number = signal.SIGINT
        """Which signal it was."""
        self.first = asyncio.Event()
        self.again = asyncio.Event()

    def __enter__(self) -> Self:
        """Takes the signals."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        return self

    def let_next_kill(self) -> None:
        """From now on a signal ends the process at once: it was told to end, and is ending."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the signals back."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        if not self.first.is_set():
            self.number = number
        (self.again if self.first.is_set() else self.first).set()


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
