"""A line's life in its process: how it ends, and what it gives back.

Theory of operation. A `Line` puts gates on a script's optimizers and schedulers, hooks on its
parameters, and hooks on the process's exit. `close` takes all of them away, so that the same
objects work without a line, or with another one. A process has one `Line` at a time: two would
gate the same optimizer twice, and it would never move.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from types import TracebackType
from typing import Self

from andon_trainer.errors import ANOTHER_RUN, LineHalted
from andon_trainer.line.properties import LineProperties
from andon_trainer.process.exits import is_interactive

__all__ = ["LineLife"]

log = logging.getLogger(__name__)

_open: weakref.WeakSet[LineLife] = weakref.WeakSet()
"""The `Line` of this process that is not closed; two only while one takes the other's place."""


class LineLife(LineProperties):
    """What begins and ends a `Line`: its script, a `with` block, or Python's exit."""

    def __enter__(self) -> Self:
        """Returns the line; `close` runs at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the line; an exception that ends the block is reported as this worker's failure.

        Raises:
            LineHalted: the workers' final weights differ.
        """
        if error is not None:
            self._worker.note_failure(error)
        self.close()

    def close(self) -> None:
        """Leaves the line and gives everything back; a second call does nothing.

        Optimizers, schedulers, models and datasets are then what they were before `prepare`, with
        the weights of now; the process's hooks and signals, too. A second `Line` can take the same
        objects. It runs by itself when Python exits, at the end of `with Line() as line:`, and for
        a line that was forgotten when a second one is made.

        Raises:
            LineHalted: the workers' final weights differ.
        """
        _open.discard(self)
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if self._stepper is not None:
            self._stepper.pause()
        try:
            self._worker.finish()
        finally:
            self._release()

    def _begin_life(self) -> None:
        """Makes this the `Line` of the process."""
        _open.add(self)
        atexit.register(self._close_at_exit)

    @staticmethod
    def _close_forgotten() -> None:
        """Closes the line of before, which nobody closed: that of a notebook's cell, run again.

        Raises:
            RuntimeError: a script trains on it.
        """
        for earlier in list(_open):
            member = earlier._worker.member
            ended = member is None or earlier.complete or bool(earlier.stopped)
            if not (ended or earlier._worker.config.solo or is_interactive()):
                raise RuntimeError(
                    f"this process trains on a line already, at step {earlier.step}: call its "
                    "line.close() first, or write `with Line() as line:`. For several workers on "
                    "one host start several processes, andon run --workers 2 train.py; for several "
                    f"runs {ANOTHER_RUN}"
                )
            if not ended:
                log.warning(
                    "the Line of before was at step %d and not closed: it is closed now. Write "
                    "`with Line() as line:`, which closes it",
                    earlier.step,
                )
            earlier._note_end()
            earlier.close()

    def _note_end(self) -> None:
        """Finds out whether the script came to its end, or something ended it."""
        # A script with manual steps does not say when its work is done: it is taken to be. In a
        # session it is not known either, but the session tells if a cell failed.
        silent = self._manual is not None and not is_interactive()
        self._worker.note_exit(done=self.complete or bool(self.stopped) or silent)

    def _close_at_exit(self) -> None:
        self._note_end()
        try:
            self.close()
        except LineHalted as halt:
            # An exception in an exit handler does not change the exit code: only this does, and
            # nothing runs after it.
            sys.stdout.flush()
            sys.stderr.write(f"{halt}\n")
            sys.stderr.flush()
            os._exit(halt.exit_code)

    def _release(self) -> None:
        """Ends everything that this object started; the line last, once nothing can use it."""
        if self._manual is not None and self._worker.is_leaving_cleanly:
            self._worker.between_steps()
        while self._undo:
            self._undo.pop()()
        if self._audit is not None:
            self._audit.close()
        for steps in (self._stepper, self._manual):
            if steps is not None:
                steps.close()
        self._splitting.close()
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
        try:
            self._worker.leave()
        finally:
            self._end_logs()
