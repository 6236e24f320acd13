"""What a collective returns: PyTorch's `Work`, over a call between the ranks.

Theory of operation. A script waits for a work in its own thread; DistributedDataParallel and C++
code ask for its future. The future must be completed by a thread that carries no collective, for it
runs callbacks that begin collectives themselves, and wait for them. And its error must be raised by
a callback (`trigger.then(raises)`): where C++ code waits for a future, an error that Python has set
with `set_exception` crashes the process.

Staged outputs land once, in the thread that first sees that the call has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from andon_torch.tensors import Staging

__all__ = ["CallWork", "DoneWork", "SeveralWorks", "Waitable"]

_NO_LIMIT = timedelta(0)


class Waitable(Protocol):
    """A call that has begun; see `andon_trainer.peers`."""

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the call's end; raises what it ended with."""

    def done(self) -> bool:
        """Whether it has ended."""

    def then(self, ended: Callable[[BaseException | None], None]) -> None:
        """Has `ended` called once, when it has ended."""


class _Futures:
    """The future of a work, made when somebody asks."""

    def __init__(self, results: list[Tensor]) -> None:
        self._results = results
        self._error: BaseException | None = None
        devices: list[Any] = sorted({each.device for each in results if each.is_cuda}, key=str)
        self._trigger: Future[Any] = Future(devices=devices) if devices else Future()
        self.future: Future[Any] = self._trigger.then(self._value)

    def complete(self, error: BaseException | None) -> None:
        """Completes the future; runs its callbacks."""
        self._error = error
        self._trigger.set_result(None)

    def _value(self, _: Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results


class CallWork(Work):
    """The work of one call."""

    def __init__(
        self, call: Waitable, staging: Staging, results: list[Tensor], timeout_s: float
    ) -> None:
        """Takes a call that has begun.

        Args:
            call: the call.
            staging: its memory.
            results: the tensors with the call's result, the value of the future.
            timeout_s: how long `wait` waits if it is not told.
        """
        super().__init__()
        self._call = call
        self._staging = staging
        self._results = results
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._futures: _Futures | None = None
        self._error: BaseException | None = None
        if staging.lands:
            # Somebody may drop this work and still expect the result.
            call.then(self._see_end)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits until the result is in the tensors.

        Raises:
            RuntimeError: the session is over, or the time-out passed: the message says who and why.
        """
        limit = timeout.total_seconds()
        self._call.wait(limit if limit > 0 else self._timeout_s)
        self._land()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`: the result is there for any stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        if not self._call.done():
            return False
        self._land()
        return True

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why the call failed; None if it did not."""
        if self._error is None and self._call.done():
            try:
                self._call.wait(None)
            except Exception as error:
                # Whatever it is: this is where it is asked for.
                self._error = error
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors with the result."""
        return self._results

    def source_rank(self) -> int:
        """Who sent what a receive from any rank received: its rank in the group."""
        sender = getattr(self._call, "sender", None)
        if sender is None:
            raise RuntimeError("only a receive from any rank that has ended has a source rank")
        return int(sender)

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the tensors with the result."""
        with self._lock:
            asked, futures = self._futures is not None, self._futures or _Futures(self._results)
            self._futures = futures
        if not asked:
            self._call.then(self._complete_future)
        return futures.future

    def _complete_future(self, error: BaseException | None) -> None:
        self._see_end(error)
        assert self._futures is not None
        self._futures.complete(self._error)

    def _see_end(self, error: BaseException | None) -> None:
        if error is not None:
            self._error = error
            return
        try:
            self._land()
        except Exception as failure:
            # The boundary of the thread that completes works: whoever waits gets it.
            self._error = failure

    def _land(self) -> None:
        with self._lock:
            if self._staging.lands and self._error is None:
                self._staging.land()


class DoneWork(CallWork):
    """The work of a call that had nothing to do."""

    def __init__(self, results: list[Tensor]) -> None:
        """Takes the result."""
        super().__init__(_Ended(), Staging(), results, 0)


class _Ended:
    """A call that has ended well."""

    def wait(self, timeout_s: float | None) -> None:
        """Waits for nothing."""

    def done(self) -> bool:
        """It is."""
        return True

    def then(self, ended: Callable[[BaseException | None], None]) -> None:
        """Calls it at once."""
        ended(None)


class SeveralWorks(Work):
    """Calls that PyTorch sees as one."""

    def __init__(self, works: list[Work], results: list[Tensor]) -> None:
        """Takes works of calls that have begun, in their order."""
        super().__init__()
        self._works = works
        self._results = results

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits for all of them; raises as the first that failed does."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first failure."""
        found = (work.exception() for work in self._works)
        return next((error for error in found if error is not None), None)

    def result(self) -> list[Tensor]:
        """The tensors with the results."""
        return self._results

    def get_future(self) -> Future[Any]:
        """A future of the tensors with the results."""
        results = self._results

        def value(all_done: Future[Any]) -> list[Tensor]:
            for future in all_done.wait():
                future.wait()  # Has ended; raises what it ended with.
            return results

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(value)
