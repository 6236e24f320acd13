"""Process: the signals and logs of a process that serves a line or starts a service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from andon.host.logs import TEXT_FORMAT, JsonLines, LogEvent, LogFormat
from andon.host.private_files import open_private
from andon_coordinator.core.effects import Effect
from andon_coordinator.core.events import Event
from andon_coordinator.core.status import LineSnapshot

__all__ = ["Interrupts", "LinePlace", "greet", "logging_to"]

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STAY_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Interrupts:
    """While entered, the first interrupt sets `first`, and every later one sets `again`.

    A process that was started under nohup goes on ignoring SIGHUP, and one in the background of a
    shell script SIGINT: Ctrl-C at the terminal is not meant for it, and also reaches it.
    """

    def __init__(self) -> None:
        """Nothing happens before it is entered."""
        ignored = [each for each in _STAY_IGNORED if signal.getsignal(each) is signal.SIG_IGN]
        self._signals = [each for each in _SIGNALS if each not in ignored]
        self.number = signal.SIGINT
        """The first signal."""
        self.first = asyncio.Event()
        self.again = asyncio.Event()

    def __enter__(self) -> Self:
        """Takes over the signals; needs a running loop."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._take, number)
        return self

    def let_next_kill(self) -> None:
        """Lets the next signal end the process at once: it is ending already."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
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
        for number in self._signals:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        # The first signal decides how the run ends; a second one only hurries it.
        if not self.first.is_set():
            self.number = number
        (self.again if self.first.is_set() else self.first).set()


def greet(text: str, *, needed: bool) -> None:
    """Prints where a service is. That nobody can read it ends the service only if it is `needed`.

    Raises:
        OSError: it is needed, and can't be written.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if needed:
            raise
        _log.warning(LogEvent("greeting_not_written", why=error.strerror or str(error)))
        # What is left in the buffer would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class LinePlace:
    """Which run is served and where its line is: an observer that every log record can ask."""

    def __init__(self, run_id: str) -> None:
        """The line's first status tells its step."""
        self._facts: dict[str, object] = {"run": run_id}

    def facts(self) -> Mapping[str, object]:
        """The run, and the step that was committed last. Any thread may ask."""
        return self._facts

    def observe(self, event: Event, done: Sequence[Effect], now: float) -> None:
        """Takes no note: a status comes a few times a second."""

    def tick(self, status: LineSnapshot) -> None:
        """Takes the line's status."""
        # Replaced as a whole and never changed in place: other threads read it.
        self._facts = {"run": status.run_id, "step": status.step}


@contextmanager
def logging_to(
    path: Path | None,
    *,
    quiet: bool,
    form: LogFormat = "text",
    facts: Callable[[], Mapping[str, object]] = dict,
) -> Iterator[None]:
    """Sends logs to a file, if any, and to stderr.

    Args:
        path: the file.
        quiet: whether only warnings go to stderr, as text: a person reads them below a run. A halt
            is left out, since `andon run` shows it in its own words.
        form: how records are written.
        facts: what holds for the process, for JSON.
    """
    terminal = logging.StreamHandler()
    targets: list[logging.Handler] = [terminal]
    if path is not None:
        targets.append(_LogFile(path, encoding="utf-8"))
    terminal.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    if quiet:
        terminal.addFilter(_is_no_halt)
    for target in targets:
        as_json = form == "json" and not (quiet and target is terminal)
        target.setFormatter(JsonLines(facts) if as_json else logging.Formatter(TEXT_FORMAT))
        root.addHandler(target)
    try:
        yield
    finally:
        for target in targets:
            root.removeHandler(target)
            target.close()
        root.setLevel(level)


def _is_no_halt(record: logging.LogRecord) -> bool:
    message: object = record.msg
    return not (isinstance(message, LogEvent) and message.name == "line_halted")


class _LogFile(logging.FileHandler):
    """A log file that may be on a full disk: it reports that once, and the service goes on."""

    _reported = False

    def _open(self) -> TextIOWrapper:
        """Opens it; only its owner may read it."""
        log = open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_private)  # noqa: SIM115 - held
        return cast("TextIOWrapper", log)

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
