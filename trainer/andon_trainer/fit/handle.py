"""The handle of a run that trains in the background: its metrics, its end, its report.

Theory of operation. A run trains on one thread of this process, which calls `Trainer.fit` and
nothing else; there is no second loop. It is a thread, not a process, for four reasons. A CUDA
context can't be taken through a fork, and what a notebook holds (the data set, a model that a
lambda closes over) can't be pickled for a fresh process. The trained model is then in reach of
whoever asked for it. PyTorch gives the interpreter lock away inside its kernels, and so does every
wait for the line, so that reading beside it costs a step little. And the line's own threads are
used to one training thread, whichever it is.

Three things belong to the process, not to the thread. Its random generators: whoever draws from
PyTorch's, NumPy's or Python's meanwhile changes the run's first weights, if they are just being
made, and its dropout masks; not its order of samples. The line's own threads draw from none of
them. Signals: Python hands them to the main thread, so a SIGTERM ends the program
there, and the program's end makes the worker leave. And there is one line in a process, so one run
at a time.

The training thread writes one frozen snapshot after each step, and every reader takes the newest
one: nobody waits for a step, and no field is of another step than the rest.

A program may end while its run trains. Python would wait for the training thread, which is no
daemon: PyTorch must not be torn down under a kernel. So another thread watches the main thread, and
asks the worker to leave when that is over, exactly as a SIGTERM does: it finishes its step, and the
others go on. That one is no daemon either: it ends with the main thread or the run, and Python
aborts now and then when it tears a thread down.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

from torch import nn

from andon_trainer.errors import LineHalted
from andon_trainer.fit.callbacks import Callback, Epoch, Evaluation, Report, Step
from andon_trainer.line.life import life_of
from andon_trainer.line.line import Line
from andon_trainer.process.exits import ProcessExit, watch_exit
from andon_trainer.termination import Terminated, Termination

__all__ = ["RunState", "TrainingMetrics", "TrainingRun"]

log = logging.getLogger(__name__)

RunState = Literal["starting", "running", "halted", "complete", "stopped", "failed"]

_ASKED_AGAIN_S = 1.0
"""How often a worker is asked to leave: it may have been about to join, where nobody hears it."""
_PROGRAM_OVER = "the program that started the run ended"
_IN_TIME = ("steps", "epochs")
"""Why runs end that came to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMetrics:
    """Where a run in the background stands: a snapshot, all of it after the same step."""

    state: RunState = "starting"
    """`starting` until this worker has joined; `running`; `halted` while the line waits for an
    operator, or if a halt ended the run; at the end `complete`, `stopped` (`run.stop`, `line.stop`,
    `andon drain`, or the program ended) or `failed`."""
    step: int = 0
    """Number of committed steps."""
    epoch: int = 0
    """The current epoch, from 0."""
    loss: float | None = None
    """Mean loss of the last step over all workers; None before the first one."""
    samples_per_second: float = 0.0
    """Of all workers together, in the last step."""
    learning_rate: float = 0.0
    """The first parameter group's, in the last step."""
    workers: int | None = None
    """Number of workers in the last step; None before this worker has joined."""
    evaluation: Evaluation | None = None
    """The last evaluation; None if there was none."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """The last number of each name that this process gave to `line.log`."""
    error: BaseException | None = None
    """What ended the run early, which `join` raises; the halt, while the line is halted."""


class TrainingRun:
    """A run that trains in the background of this process; `Trainer.start` returns it.

    ```python
    run = trainer.start(Fit(batch_size=64, epochs=10))
    print(run.metrics().loss)
    run.stop("good enough")
    report = run.join()
    ```

    Any thread may call its methods, and none of them waits for a step but `join`.
    """

    def __init__(
        self, train: Callable[[Callback], Report], program: threading.Thread | None = None
    ) -> None:
        """Begins to train.

        Args:
            train: trains to the end, and calls the callback it is given after all others.
            program: the worker leaves when this thread is over; None: the main thread.

        Raises:
            RuntimeError: another run trains in this process.
        """
        global _newest
        with _beginning:
            if _newest is not None:
                if not _newest.over:
                    step = _newest.metrics().step
                    raise RuntimeError(
                        f"a run trains in this process already, at step {step}: call its join() or "
                        "stop() first. Several runs at a time are several processes"
                    )
                _newest._give_back()
            self._train = train
            self._program = program or threading.main_thread()
            self._watch = _Watch()
            self._report: Report | None = None
            self._error: BaseException | None = None
            self._traceback: TracebackType | None = None
            self._thread = threading.Thread(target=self._run, name="andon-run")
            # A SIGTERM ends the program, whose end makes the worker leave after its step.
            self._termination = Termination()
            self._termination.install(lambda _why: False)
            # An error of the run's that `join` raises gives the program its exit code.
            self._exit: ProcessExit | None = watch_exit()
            _newest = self
            self._thread.start()
        threading.Thread(target=self._leave_with_program, name="andon-run-end").start()

    def metrics(self) -> TrainingMetrics:
        """Where the run stands. It waits for nothing: not for a step, and not for the line."""
        seen = self._watch.seen
        life = None if self.over else life_of(self._thread)
        halt = None if life is None else life.halt
        if halt is not None and seen.error is None:
            return replace(seen, state="halted", error=LineHalted(halt))
        return seen

    def stop(self, reason: str = "run.stop") -> None:
        """Ends the run with the current step or the next one, the same on all workers.

        It returns at once; `join` waits for the end. The first reason counts, and of a run that is
        over nothing changes. On a line with `--may-stop operators` it has no effect, and the log
        says so.

        Args:
            reason: becomes `Report.stopped`, and `line.stopped` on all workers.
        """
        self._watch.stop(reason)

    def join(self, timeout: float | None = None) -> Report:
        """Waits for the end of the run, and returns its report.

        A line that is halted is waited for with `on_halt="wait"`, which `andon run` sets.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: the run goes on after `timeout`.
            Exception: whatever `Trainer.fit` raised, with its own traceback: LineHalted with
                `on_halt="raise"`, an error of the script, and so on.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the run goes on after {timeout} s, at step {self.metrics().step}: join again, or "
                "call stop() first"
            )
        self._give_back()
        if self._error is not None:
            # Its own traceback each time: every raise adds the frames that it passes.
            raise self._error.with_traceback(self._traceback)
        assert self._report is not None
        return self._report

    @property
    def over(self) -> bool:
        """Whether the run is over, well or not; `join` then returns at once."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        """The training thread's whole life."""
        try:
            self._report = self._train(self._watch)
        except BaseException as error:  # Whatever it is, `join` raises it.
            self._error, self._traceback = error, error.__traceback__
            self._watch.failed(error)
            if not isinstance(error, Terminated):
                log.exception("the run in the background ended, and join() raises why")

    def _leave_with_program(self) -> None:
        while self._program.is_alive() and self._thread.is_alive():
            self._program.join(_ASKED_AGAIN_S)
        if not self._thread.is_alive():
            return
        log.warning(
            "the program ended while its run was at step %d: this worker leaves after its step. "
            "Call run.join() to train to the end",
            self.metrics().step,
        )
        while self._thread.is_alive():
            self._watch.leaving = True
            if (life := life_of(self._thread)) is not None:
                life.leave(_PROGRAM_OVER)
            self._thread.join(_ASKED_AGAIN_S)

    def _give_back(self) -> None:
        """Gives back what the run took of the process, once."""
        self._termination.remove()
        leaving, self._exit = self._exit, None
        if leaving is not None:
            leaving.end_with(self._error)


class _Watch(Callback):
    """Follows a run on its own thread, and ends it when somebody asks; the last of its callbacks.

    Other threads read `seen`, and set `leaving` and the reason to stop: single references.
    """

    def __init__(self) -> None:
        self.seen = TrainingMetrics()
        self.leaving = False
        self._stop_reason = ""
        self._line: Line | None = None

    def stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason or "run.stop"
        self._end_run()

    def failed(self, error: BaseException) -> None:
        state: RunState = "failed"
        if isinstance(error, LineHalted):
            state = "halted"
        elif isinstance(error, Terminated):
            state = "stopped"
        self.seen = replace(self.seen, state=state, error=error)

    def on_start(self, line: Line, model: nn.Module) -> None:
        self._line = line
        self.seen = replace(self.seen, state="running", step=line.step, epoch=line.epoch)
        self._go_on()

    def on_step(self, step: Step) -> None:
        assert self._line is not None
        self.seen = replace(
            self.seen,
            step=step.number,
            epoch=self._line.epoch,
            loss=step.loss,
            samples_per_second=step.samples_per_second,
            learning_rate=step.learning_rate,
            workers=self._line.world_size,
            logged=self._line.logged,
        )
        self._go_on()

    def on_evaluate(self, evaluation: Evaluation) -> None:
        assert self._line is not None
        self.seen = replace(self.seen, evaluation=evaluation, logged=self._line.logged)
        self._go_on()

    def on_epoch(self, epoch: Epoch) -> None:
        assert self._line is not None
        self.seen = replace(self.seen, epoch=self._line.epoch, logged=self._line.logged)

    def on_end(self, report: Report) -> None:
        ended: RunState = "complete" if report.stopped in _IN_TIME else "stopped"
        self.seen = replace(self.seen, state=ended, step=report.steps, epoch=report.epochs)

    def _go_on(self) -> None:
        """Ends the loop, or the run, if somebody has asked for that meanwhile."""
        if self.leaving:
            raise Terminated
        # Again after each step: a step that was just being reported may not have seen it.
        self._end_run()

    def _end_run(self) -> None:
        if self._line is not None and self._stop_reason and not self._line.stopped:
            with suppress(RuntimeError):  # The line was closed in this moment: the run is over.
                self._line.stop(self._stop_reason)


_newest: TrainingRun | None = None
_beginning = threading.Lock()
"""Held while a run begins: two threads must not begin one each."""
