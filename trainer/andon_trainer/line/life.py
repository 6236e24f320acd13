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
import threading
import weakref
from collections.abc import Callable

from andon.protocol.halts import HaltEvidence
from andon_trainer.errors import ANOTHER_RUN, LineHalted
from andon_trainer.line.session import LineSession
from andon_trainer.process.exits import is_interactive

__all__ = ["Life", "close_forgotten", "life_of"]

log = logging.getLogger(__name__)

_open: weakref.WeakSet[Life] = weakref.WeakSet()
"""The lives of this process that are not over; two only while one takes the other's place."""
_by_thread: weakref.WeakValueDictionary[threading.Thread, Life] = weakref.WeakValueDictionary()
"""The newest life of each thread. One look-up is safe beside a thread that makes a line."""


class Life:
    """What ends a `Line`: its script, a `with` block, or Python's exit."""

    def __init__(self, session: LineSession, end_logs: Callable[[], None]) -> None:
        """Makes the session that of the process; `end_logs` ends what is written of its logs."""
        self._session = session
        self._end_logs = end_logs
        self._thread = threading.current_thread()
        """The thread that trains on it."""
        _open.add(self)
        _by_thread[self._thread] = self
        atexit.register(self.close_at_exit)

    def close(self) -> None:
        """See `Line.close`."""
        _open.discard(self)
        session = self._session
        session.closed = True
        atexit.unregister(self.close_at_exit)
        if session.stepper is not None:
            session.stepper.pause()
        try:
            session.worker.finish()
        finally:
            self._release()

    def give_way(self) -> None:
        """Closes a line that nobody closed, for another one.

        Raises:
            RuntimeError: a script trains on it.
        """
        session = self._session
        if self._trains_elsewhere:
            raise RuntimeError(
                f"a run trains in the background of this process, at step {session.step}, and a "
                "process has one Line at a time: call run.join() or run.stop() first"
            )
        ended = session.worker.member is None or session.complete or bool(session.stopped)
        if not (ended or session.worker.config.solo or is_interactive()):
            raise RuntimeError(
                f"this process trains on a line already, at step {session.step}: call its "
                "line.close() first, or write `with Line() as line:`. For several workers on "
                "one host start several processes, andon run --workers 2 train.py; for several "
                f"runs {ANOTHER_RUN}"
            )
        if not ended:
            log.warning(
                "the Line of before was at step %d and not closed: it is closed now. Write "
                "`with Line() as line:`, which closes it",
                session.step,
            )
        self._note_end()
        try:
            self.close()
        except LineHalted as halt:
            # Whoever ran the cell has seen it. The next line has nothing to do with it.
            if not is_interactive():
                raise
            log.warning("%s", halt)

    def close_at_exit(self) -> None:
        """Closes a line that is open when Python exits; a halt there gives the exit code."""
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

    @property
    def halt(self) -> HaltEvidence | None:
        """The halt that the line is in, as far as this worker knows; any thread may ask."""
        member = self._session.worker.member
        return None if member is None else member.position.halt

    def leave(self, why: str) -> None:
        """Makes the worker leave once its step is over; any thread may ask, and again."""
        self._session.worker.ask_to_leave(why)

    @property
    def _trains_elsewhere(self) -> bool:
        """Whether a run in the background trains on it: nobody there has forgotten it."""
        others = self._thread not in (threading.current_thread(), threading.main_thread())
        return others and self._thread.is_alive()

    def _note_end(self) -> None:
        """Finds out whether the script came to its end, or something ended it."""
        session = self._session
        # A script with manual steps does not say when its work is done: it is taken to be. In a
        # session it is not known either, but the session tells if a cell failed.
        silent = session.manual is not None and not is_interactive()
        session.worker.note_exit(done=session.complete or bool(session.stopped) or silent)

    def _release(self) -> None:
        """Ends everything that the line started; its membership last, once nothing can use it."""
        session = self._session
        if session.manual is not None and session.worker.is_leaving_cleanly:
            session.worker.between_steps()
        # The last first: what was done last may stand on what was done before.
        while session.undo:
            session.undo.pop()()
        if session.audit is not None:
            session.audit.close()
        for steps in (session.stepper, session.manual):
            if steps is not None:
                steps.close()
        session.splitting.close()
        if session.feeder is not None:
            session.feeder.close()
            session.feeder = None
        try:
            session.worker.leave()
        finally:
            self._end_logs()


def close_forgotten() -> None:
    """Closes the line of before, which nobody closed: that of a notebook's cell, run again.

    Raises:
        RuntimeError: a script trains on it.
    """
    for earlier in list(_open):
        earlier.give_way()


def life_of(thread: threading.Thread) -> Life | None:
    """The life of the line that `thread` made last, while somebody holds it; any thread may ask."""
    return _by_thread.get(thread)
