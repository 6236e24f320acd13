"""Process: the signals and logs of a process that serves a line or starts a service."""

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
    """While entered, the first interrupt sets `first`, and every later one sets `again`."""

    def __init__(self) -> None:
        """Nothing happens before it is entered."""
        self.number = signal.SIGINT
        """The first signal."""
        self.first = asyncio.Event()
        self.again = asyncio.Event()

    def __enter__(self) -> Self:
        """Takes over the signals; needs a running loop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        return self

    def let_next_kill(self) -> None:
        """Lets the next signal end the process at once: it is ending already."""
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
        """Stops handling the signals."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        # The first signal decides how the run ends; a second one only hurries it.
        if not self.first.is_set():
            self.number = number
        (self.again if self.first.is_set() else self.first).set()


@contextmanager
def logging_to(path: Path | None, *, quiet: bool) -> Iterator[None]:
    """Sends logs to a file, if any, and to stderr; only warnings to stderr if `quiet`."""
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
    """A log file that may be on a full disk: it reports that once, and the service goes on."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Reports a failed write once. Errors of other kinds are reported as usual."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            with suppress(OSError):
                sys.stderr.write(
                    f"{self.baseFilename} can't be written ({error.strerror}): it lacks records\n"
                )

    def close(self) -> None:
        """Closes the file. What can't be written even now is lost."""
        with suppress(OSError):
            super().close()
