"""The gate for DistributedDataParallel over NCCL or Gloo: a communication hook.

Theory of operation. The hook looks whether a bucket is finite before it hands it on to the default
all-reduce, which stays with the group's own backend. A rank that finds a bad value sends nothing:
it tells the coordinator of a session that the group's ranks formed for this, and the session ends
for all. The future that DistributedDataParallel waits for is the hook's own: it ends when the
all-reduce has, or when the session is over, whichever comes first.

On a GPU the look waits for the bucket's gradients.
"""

# Without `annotations` of `__future__`: PyTorch looks at those of the hook.

import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported by a star
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from andon.protocol.sessions import RankFault, SessionEnd, SessionOver
from andon_torch.gate import backward_pass, describe, first_bad
from andon_torch.process_group import AndonProcessGroup
from andon_torch.session import NewGroup, TorchSession, session_of
from andon_trainer.errors import SessionEnded

__all__ = ["watch_hook"]

_lock = threading.Lock()
_watched: "weakref.WeakKeyDictionary[Any, _GroupWatch]" = weakref.WeakKeyDictionary()
"""The watch of each group whose buckets were seen."""


def watch_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket as DistributedDataParallel does, if no rank's is NaN or infinite.

    `model.register_comm_hook(None, andon_torch.watch_hook)`, on every rank. Else all ranks stop
    before a weight moves: `backward()` raises a RuntimeError that names rank, parameter and
    element.

    Args:
        state: the model's process group; None: the default group.
        bucket: gradients, as PyTorch hands them to hooks.

    Raises:
        AndonError: the ranks can't form a session.
    """
    group: Any = state if state is not None else dist.group.WORLD
    if isinstance(group, AndonProcessGroup):
        return allreduce_hook(group, bucket)  # The group has a gate of its own.
    with _lock:
        watch = _watched.get(group)
        if watch is None:
            watch = _watched[group] = _GroupWatch(_session_for(group))
    return watch.exchange(group, bucket)


def _session_for(group: Any) -> TorchSession:
    ranks = tuple(dist.get_process_group_ranks(group))
    return session_of(
        NewGroup(
            name=f"watch of {group.group_name}",
            rank=group.rank(),
            ranks=ranks,
            whole=len(ranks) == dist.get_world_size(),
            timeout=dist.distributed_c10d.default_pg_timeout,
            store=dist.distributed_c10d._world.pg_map[group][1],
        )
    )


class _GroupWatch:
    """The buckets of one group that are exchanged now."""

    def __init__(self, session: TorchSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._open: set[_Exchange] = set()
        session.attending.watch(self._fail_all)

    def exchange(self, group: Any, bucket: GradBucket) -> Future[Tensor]:
        """The future of one bucket."""
        attending, watch = self._session.attending, self._session.watch
        backward = backward_pass()
        if backward is not None:
            watch.note_step(backward)
            if self._session.recording is not None:
                self._session.recording.in_backward(backward, watch.steps)
        values = bucket.buffer()
        exchange = _Exchange([values.device] if values.is_cuda else [])
        with self._lock:
            self._open.add(exchange)
        bad = first_bad(values)
        if attending.over is not None:
            self._fail_all(attending.over)
        elif bad is not None and watch.closed and not watch.expects_overflow(backward):
            found = describe(values.detach(), bad)
            attending.fault(
                RankFault(
                    end=SessionEnd.NON_FINITE,
                    culprit=attending.rank,
                    message=f"bucket {bucket.index()} of DistributedDataParallel",
                    parameter=found.parameter,
                    element=found.element,
                    value=found.value,
                )
            )
        else:
            allreduce_hook(group, bucket).then(lambda done: self._pass_on(exchange, done))
        return exchange.future

    def _pass_on(self, exchange: "_Exchange", done: Future[Tensor]) -> None:
        with self._lock:
            self._open.discard(exchange)
        exchange.end(done, None)

    def _fail_all(self, over: SessionOver) -> None:
        with self._lock:
            failed, self._open = self._open, set()
        for each in failed:
            each.end(None, SessionEnded(over))


class _Exchange:
    """One bucket; its future is completed once, by a callback that returns or raises."""

    def __init__(self, devices: list[Any]) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._done: Future[Tensor] | None = None
        self._error: BaseException | None = None
        self._trigger: Future[Any] = Future(devices=devices) if devices else Future()
        self.future: Future[Tensor] = self._trigger.then(self._value)

    def end(self, done: Future[Tensor] | None, error: BaseException | None) -> None:
        """Completes the future; only the first call counts."""
        with self._lock:
            if self._ended:
                return
            self._ended, self._done, self._error = True, done, error
        self._trigger.set_result(None)

    def _value(self, _: Future[Any]) -> Tensor:
        if self._error is not None:
            raise self._error
        assert self._done is not None
        result = self._done.value()
        return result[0] if isinstance(result, list | tuple) else result
