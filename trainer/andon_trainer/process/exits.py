"""Exits: whether the script came to its end, or was ended by an exception that nobody showed us.

Theory of operation. Python tells `sys.excepthook` of an uncaught exception, but a script or a
library may replace that hook, and an exception may become a `SystemExit` before it gets there, as
Hydra's do. So three more things are looked at when the process exits: the exception that Python
itself remembers as uncaught (`sys.last_exc`), the frame that everything ran in, which ended by a
return or did not, and the code that `sys.exit` was given last. A code that the script caught is
known by the frame: it returned all the same. Of a `SystemExit` that was raised by hand nobody tells
the code; then the caller's word decides, whether its work was done.

`os._exit` runs none of this: to the line such a worker is lost.
"""

from __future__ import annotations

import dis
import sys
import threading
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

from andon_trainer.errors import AndonError, RunOver, WorkerDropped

__all__ = ["Exit", "watch_exit"]

_IN_WORDS = (RunOver, WorkerDropped)
"""What is no mistake of the script, and no news to whoever brought it about: no traceback."""


class Exit:
    """How this process ends, as far as it can be seen from inside."""

    def __init__(self) -> None:
        """Looks at nothing yet."""
        self.error: BaseException | None = None
        """What was uncaught, as the hook was told."""
        self._root: FrameType | None = None
        self._code: object = None
        self._exit_called = False
        self._cause: BaseException | None = None
        self._stale = _last_uncaught()

    def begin(self) -> None:
        """Watches from now on; what somebody else put in place of our hooks is put behind them."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._root is None:
            root = sys._getframe()
            while root.f_back is not None:
                root = root.f_back
            self._root = root
        if not hasattr(sys.excepthook, "andon"):
            self._take_excepthook()
        if not hasattr(sys.exit, "andon"):
            self._take_exit()

    def failure(self, *, done: bool) -> BaseException | None:
        """What ended the script before its end; None if nothing did. Ask it when Python exits.

        Args:
            done: whether the script's part is done, as far as that is known: what a `SystemExit`
                without a known code is judged by.
        """
        if self.error is not None or _interactive():
            return self.error
        uncaught = _last_uncaught()
        if uncaught is not None and uncaught is not self._stale:
            return uncaught
        if self._root is None or _returned(self._root):
            return None
        if not self._exit_called:
            return None if done else SystemExit("raised in the midst of the work")
        if self._code is None or self._code == 0:
            return None
        return self._cause or SystemExit(f"sys.exit({self._code!r})")

    def _take_excepthook(self) -> None:
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            if _interactive():
                previous(kind, error, traceback)  # The session goes on.
                return
            self.error = error
            try:
                if isinstance(error, _IN_WORDS):
                    sys.stderr.write(f"{error}\n")
                else:
                    previous(kind, error, traceback)
            finally:
                # Also if the hook before ours ends the process in its own way.
                if isinstance(error, AndonError):
                    raise SystemExit(error.exit_code)

        hook.andon = True  # type: ignore[attr-defined]  # a mark
        sys.excepthook = hook

    def _take_exit(self) -> None:
        leave = sys.exit

        def exit_noted(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._exit_called, self._code, self._cause = True, status, sys.exception()
            leave(status)

        exit_noted.andon = True  # type: ignore[attr-defined]  # a mark
        sys.exit = exit_noted


@cache
def _exit_of_process() -> Exit:
    return Exit()


def watch_exit() -> Exit:
    """The exit of this process, watched from the first call on."""
    ending = _exit_of_process()
    ending.begin()
    return ending


def _last_uncaught() -> BaseException | None:
    """The exception that Python would let `pdb.pm` look at."""
    found = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


def _interactive() -> bool:
    """Whether an uncaught exception ends no more than a line that somebody typed."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _returned(frame: FrameType) -> bool:
    """Whether a frame that is over ended by a return."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.opname.startswith("RETURN_")
    return False
