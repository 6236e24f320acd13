"""What a script's DataLoader loads of the shares that a worker asks for, and its processes.

Theory of operation. The loader is rebuilt over a batch sampler that yields whatever this rank's
share is. With loading processes, which start in `open`, it is a pipeline: the share that is asked
for, followed by the shares that are foreseen, as far as torch prefetches. If the next share that is
asked for is the foreseen one, its batches are on their way already. If not (the roster changed, or
a step is tried again), iterating the persistent loader again drains and drops what is on its way,
and the same processes go on.

Forked processes stay until `close`, since nothing may be forked while this process is on the line.
Without `persistent_workers=True` a script expects new ones in each epoch, made of what the dataset
is by then. So what it has changed of the dataset travels to them when an epoch begins. Processes
that are spawned are started anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from andon_trainer.data.dataset_epochs import DatasetEpochs, EpochCalls
from andon_trainer.data.feed import Share
from andon_trainer.data.loader import processes_stay
from andon_trainer.state import rng

__all__ = ["Request", "ShareLoading"]

_CPU = torch.device("cpu")


class Request(Protocol):
    """What a loader is asked for: one batch."""

    @property
    def calls(self) -> EpochCalls:
        """The calls of `set_epoch` that are due before it is loaded."""


class _Requests(Sampler[Any]):
    """A batch sampler that yields what is asked for; that changes between iterations."""

    def __init__(self, wanted: Callable[[Share], Sequence[Request] | None]) -> None:
        self._wanted = wanted
        self._shares: Iterator[Any] = iter(())
        self.taken: deque[tuple[Share, EpochCalls]] = deque()
        """Shares that torch has taken the requests of, with the calls that these carry; the first
        is the one that it yields next."""

    def restart(self, shares: Iterator[Any]) -> None:
        """Makes the next iteration go over these shares; what is no share is asked as it is."""
        self._shares = shares
        self.taken.clear()

    def __iter__(self) -> Iterator[Any]:
        return self._requests(self._shares)

    def _requests(self, shares: Iterator[Any]) -> Iterator[Any]:
        for share in shares:
            if not isinstance(share, Share):
                yield share
                continue
            wanted = self._wanted(share)
            if wanted is None:
                return
            if wanted:  # Else this rank has no samples in that step.
                self.taken.append((share, wanted[0].calls))
            yield from wanted


class ShareLoading:
    """Loads shares with a script's DataLoader, as it would itself. Used by one thread."""

    def __init__(
        self,
        given: DataLoader[Any],
        rebuild: Callable[[Sampler[Any]], DataLoader[Any]],
        wanted: Callable[[Share], Sequence[Request] | None],
    ) -> None:
        """Starts no process yet.

        Args:
            given: the script's loader.
            rebuild: makes the same over another batch sampler, with processes that stay.
            wanted: a share's batches; None if it can't be foreseen.
        """
        self.parallel = given.num_workers > 0
        """Whether there are loading processes."""
        self.epochs = DatasetEpochs(given.dataset)
        """The dataset's calls of `set_epoch`."""
        self.epoch: int | None = None
        """The epoch that was entered last."""
        self._given = given
        self._rebuild = rebuild
        self._requests = _Requests(wanted)
        self._loader: DataLoader[Any] | None = rebuild(self._requests)
        self._served: int | None = None
        """The epoch that the processes were started for; None: whichever comes first."""
        self._stream: Iterator[Any] | None = None
        """What the processes loaded; None before `open`, and without processes."""
        self._midway = False
        """Whether what the stream yields next is not the first batch of its share."""

    def open(self) -> None:
        """Starts the loading processes; a second call does nothing.

        Call it before any gRPC channel exists: a forked child must not inherit one.
        """
        if self.parallel and self._stream is None:
            self._stream = iter(self._open_loader())
            self.epochs.remember()
        # After the fork: the child must have the dataset's own `set_epoch`.
        self.epochs.observe()

    def enter(self, epoch: int, *, ends_with_data: bool = False) -> None:
        """An epoch begins. Processes that are not to stay end with the one before.

        Args:
            epoch: another one than before.
            ends_with_data: whether it ends where the data ends.

        Raises:
            ValueError: the script has changed data that is too much for the processes.
        """
        self.epoch = epoch
        self.epochs.enter(epoch)
        if self._stream is None or self._given.persistent_workers:
            return
        if processes_stay(self._given):
            self.epochs.look_for_changes(ends_with_data=ends_with_data)
            return
        if self._served is not None:
            self._end_processes()
            self.epochs.stop_observing()
            self._loader = self._rebuild(self._requests)
            self.open()
        self._served = epoch

    def drop_ahead(self) -> None:
        """What was loaded ahead are other samples than those that will be asked for."""
        self._requests.restart(iter(()))

    def batches(
        self, share: Share, count: int, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[Any]:
        """The `count` batches of a share in order; processes load the upcoming ones ahead.

        Without processes the script's random generators keep their states.

        Raises:
            RuntimeError: there are loading processes, and `open` was not called.
        """
        # The stream goes on only if it stands at the first batch of this very share, and that was
        # loaded after the calls of `set_epoch` that are due.
        taken = self._requests.taken
        due = share, self.epochs.calls(share.epoch)
        if self._stream is None or self._midway or not taken or taken[0] != due:
            stream = self._begin(_chain(share, upcoming) if self.parallel else iter((share,)))
        else:
            stream = self._stream
        # A loop may leave this generator at any `yield`. Until the last batch is out, the stream
        # does not stand at the beginning of a share, and the next call must restart it.
        self._midway = True
        for number in range(1, count + 1):
            batch = self._next(stream)
            if number == count:
                taken.popleft()
                self._midway = False
            yield batch

    def ask(self, request: Any) -> Any:
        """What the loader gives for one request that is no share."""
        self._midway = True
        return self._next(self._begin(iter((request,))))

    def require_open(self) -> None:
        """Raises RuntimeError after `close`."""
        self._open_loader()

    def close(self) -> None:
        """Ends the loading processes; a second call does nothing."""
        self._end_processes()
        self._loader = None
        self.epochs.stop_observing()

    def _begin(self, shares: Iterator[Any]) -> Iterator[Any]:
        """An iteration of the loader."""
        loader = self._open_loader()
        if self.parallel and self._stream is None:
            raise RuntimeError("call open() before the first batch: it starts the processes")
        self._requests.restart(shares)
        stream = iter(loader)
        if self.parallel:
            self._stream = stream
        return stream

    def _next(self, stream: Iterator[Any]) -> Any:
        if self.parallel:
            return next(stream)
        states = rng.capture(_CPU)
        try:
            return next(stream)
        finally:
            rng.restore(states, _CPU)

    def _end_processes(self) -> None:
        stream, self._stream = self._stream, None
        self.drop_ahead()
        self._midway = False
        # Called here, and not left to the garbage collector: a suspended `batches` may hold the
        # stream too, and the processes would live as long as it does.
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _open_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            raise RuntimeError("the feeder is closed")
        return self._loader


def _chain(share: Share, upcoming: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    yield share
    yield from upcoming()
