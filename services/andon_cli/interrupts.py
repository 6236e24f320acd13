"""Interrupts: Ctrl-C and its like, as events of the loop."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType
from typing import Self

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
