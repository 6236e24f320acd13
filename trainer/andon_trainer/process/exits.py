"""How the process exits: whether the script came to its end, or an exception ended it.

Theory of operation. Python passes an uncaught exception to `sys.excepthook`. But a script or a
library may replace that hook, and an exception may become a `SystemExit` before it gets there, as
Hydra's do. So three more things are examined when the process exits: the exception that Python
itself remembers as uncaught (`sys.last_exc`); the outermost frame, which either ended with a return
or did not; and the last argument of `sys.exit`. If the script caught that exit, the frame tells: it
returned after all. The code of a `SystemExit` that a script raises without `sys.exit`, `exit` or
`quit` is unknown; then it counts whether the work was done, which the caller says.

`os._exit` runs none of this. The line then sees that worker as lost.
"""

from __future__ import annotations

import builtins
import dis
import io
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

from andon_trainer.errors import AndonError, WorkerDropped

__all__ = ["ProcessExit", "is_interactive", "watch_exit"]


_MOST_LINKS = 16
"""Errors that are looked at behind an uncaught one: what raised it, and what raised that."""


class ProcessExit:
    """How this process ends, as far as it can tell."""

    def __init__(self) -> None:
        """Watches nothing yet."""
        self.error: BaseException | None = None
        """The uncaught exception that the hook got."""
        self._explanations: list[AndonError] = []
        self._root: FrameType | None = None
        self._code: object = None
        self._exit_called = False
        self._cause: BaseException | None = None
        # One from before this worker: a notebook's earlier cell, for example.
        self._stale = _last_uncaught()
        self._watchers = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Watches from now on; calls a hook that somebody set meanwhile after our own."""
        self._watchers += 1
        if self._watchers == 1:
            self.error, self._stale = None, _last_uncaught()
            self._exit_called, self._code, self._cause = False, None, None
            self._explanations = []
        if threading.current_thread() is not threading.main_thread():
            return  # Another thread's exceptions and frames do not end the process.
        if self._root is None:
            root = sys._getframe()
            while root.f_back is not None:
                root = root.f_back
            self._root = root
        if not hasattr(sys.excepthook, "andon"):
            self._take_excepthook()
        if not hasattr(sys.exit, "andon"):
            self._take_exit()
        self._take_quitter()

    def end(self, *, undo: bool = True) -> None:
        """Ends a `begin`; after the last one nobody is told how the process ends.

        Args:
            undo: whether the process's hooks become what they were. Not if an exception of the
                line's own is on its way out of the script: the hook gives it its exit code.
        """
        self._watchers -= 1
        if undo and not self._watchers:
            while self._undo:
                self._undo.pop()()

    def end_with(self, error: BaseException | None) -> None:
        """Ends a `begin` of what `error` ended; None: nothing did.

        One of our own keeps the hooks. A session goes on after it, so there they are given back.
        """
        self.end(undo=not isinstance(error, AndonError) or is_interactive())

    def explain(self, error: AndonError) -> None:
        """Gives the exit code of `error` to uncaught errors of other types that have its text.

        What goes through PyTorch's C++ comes out as a RuntimeError.
        """
        self._explanations.append(error)

    def _ours(self, error: BaseException) -> AndonError | None:
        """The error of our own that an uncaught one is, or tells of; None: it is the script's."""
        if isinstance(error, AndonError):
            return error
        texts: list[str] = []
        link: BaseException | None = error
        while link is not None and len(texts) < _MOST_LINKS:
            texts.append(str(link))
            link = link.__cause__ or link.__context__
        told = (each for each in self._explanations if any(str(each) in text for text in texts))
        return next(told, None)

    def failure(self, *, done: bool) -> BaseException | None:
        """What ended the script early; None if nothing did. Call it when Python exits.

        Args:
            done: whether the script's work is known to be done; it decides about a `SystemExit`
                whose code is unknown.
        """
        if self.error is not None:
            return self.error
        uncaught = _last_uncaught()
        if uncaught is self._stale:
            uncaught = None
        if is_interactive():
            # A cell that failed does not end the process. If the work was done in another cell
            # later, it failed for nothing.
            ended_well = done or (isinstance(uncaught, SystemExit) and not uncaught.code)
            return None if ended_well else uncaught
        if uncaught is not None:
            return uncaught
        if self._root is None or _returned(self._root):
            return None
        if not self._exit_called:
            return None if done else SystemExit("raised before the work was done")
        if self._code is None or self._code == 0:
            return None
        return self._cause or SystemExit(f"sys.exit({self._code!r})")

    def _take_excepthook(self) -> None:
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            if is_interactive():
                previous(kind, error, traceback)  # The session goes on.
                return
            self.error = error
            try:
                if _needs_no_traceback(error):
                    sys.stderr.write(f"{error}\n")
                else:
                    previous(kind, error, traceback)
            finally:
                # In `finally`: the previous hook may raise, or end the process itself.
                if (ours := self._ours(error)) is not None:
                    _write_collected()
                    raise SystemExit(ours.exit_code)

        self._put(sys, "excepthook", hook)

    def _take_exit(self) -> None:
        leave = sys.exit

        def exit_noted(status: Any = None, /) -> NoReturn:
            self._note(status)
            leave(status)

        self._put(sys, "exit", exit_noted)

    def _take_quitter(self) -> None:
        """Notes the code of `exit(1)` and `quit(1)`, which do not come to `sys.exit`."""
        quitter: Any = type(getattr(builtins, "exit", None))
        call = vars(quitter).get("__call__")
        if call is None or hasattr(call, "andon"):
            return  # Python was started without them.

        def call_noted(this: object, code: Any = None) -> None:
            self._note(code)
            call(this, code)

        self._put(quitter, "__call__", call_noted)

    def _put(self, owner: object, name: str, ours: Any) -> None:
        """Puts a function of ours in another's place until the end, or until somebody does it."""
        previous, ours.andon = getattr(owner, name), True
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, previous)

        self._undo.append(undo)

    def _note(self, code: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._exit_called, self._code, self._cause = True, code, sys.exception()


@cache
def _exit_of_process() -> ProcessExit:
    return ProcessExit()


def watch_exit() -> ProcessExit:
    """This process's exit, which is watched from the first call on."""
    ending = _exit_of_process()
    ending.begin()
    return ending


def _needs_no_traceback(error: BaseException) -> bool:
    """Whether an error's message is enough: the script is not at fault, and nothing failed."""
    if isinstance(error, WorkerDropped):
        return True  # An operator brought it about.
    return isinstance(error, AndonError) and error.exit_code == 0


def _write_collected() -> None:
    """Writes what a hook around ours collects: it is left by an exception, and would write nothing.

    That of `torch.distributed` collects, to put the rank before each line.
    """
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.__stderr__.write(sys.stderr.getvalue())
        sys.__stderr__.flush()


def _last_uncaught() -> BaseException | None:
    """The exception that `pdb.pm` would examine."""
    found = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


def is_interactive() -> bool:
    """Whether somebody types commands, so that an uncaught exception does not end the process."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _returned(frame: FrameType) -> bool:
    """Whether a finished frame ended with a return."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.opname.startswith("RETURN_")
    return False
