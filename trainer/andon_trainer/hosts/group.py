"""The processes of one host: how they meet, tell each other what happened, and pass tensors on.

Theory of operation. The processes of a host run the same script in lockstep. Process 0, the leader,
is the line's worker; the others follow it. They talk in two ways. *Messages* are
small objects over a Gloo group of their own: all meet at the calls that a script makes together,
and the leader then tells what came of it. *Tensors* are summed, sent to the leader and broadcast
over a second group, which has the backend of the script's own group: NCCL between GPUs, Gloo
between CPUs.

Both groups are apart from the script's, whose own collectives (SyncBatchNorm) may come between any
two of ours. A process that dies closes its connections, which ends the others' calls with an error:
so no call over Gloo needs a time limit, and the leader may wait for the line for hours.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from andon_trainer.errors import HostLost

__all__ = ["HostGroup", "Pending", "TorchHostGroup"]

_PATIENCE = timedelta(days=365)
"""No limit: a process that waits for the line lets the others of its host wait, too."""


class Pending(Protocol):
    """A sum or a transfer that was begun."""

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self) -> None:
        """Waits for it. On a GPU only the present stream waits, and no thread.

        Raises:
            HostLost: another process is gone.
        """


class HostGroup(Protocol):
    """The processes of a host. Used by one thread of each; every method is a call of all."""

    @property
    def rank(self) -> int:
        """This process's number in its host, from 0. Process 0 leads."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def of_devices(self) -> bool:
        """Whether a GPU's tensors are sent from where they are; else from host memory alone."""

    def meet(self, item: Any) -> list[Any]:
        """What each process brought, in their order.

        Raises:
            HostLost: one of them is gone.
        """

    def tell(self, item: Any) -> None:
        """The leader's message to the others, who call `hear`."""

    def hear(self) -> Any:
        """The leader's message."""

    def start_sum(self, flat: torch.Tensor) -> Pending:
        """Begins to replace `flat` by the sum of all processes'."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Overwrites `flat` with the leader's."""

    def start_send(self, flat: torch.Tensor) -> Pending:
        """Begins to send to the leader, which receives from this process in the same order."""

    def start_receive(self, rank: int, flat: torch.Tensor) -> Pending:
        """Begins to overwrite `flat` with what process `rank` sends; the leader calls it."""

    def close(self) -> None:
        """Ends the connections, and so whatever the others wait for here."""


class TorchHostGroup:
    """A host's processes, by `torch.distributed`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Opens two groups beside the script's; all processes of `group` must do so together."""
        self._ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(self._ranks)
        backend = dist.get_backend(group)
        self._groups = {
            "messages": self._open("gloo", _PATIENCE),
            "cpu": self._open("gloo", _PATIENCE),
        }
        if backend != "gloo":
            # With torch's own limit: NCCL does not notice that a process is gone.
            self._groups["cuda"] = self._open(backend, None)
        self.of_devices = backend != "gloo"

    def meet(self, item: Any) -> list[Any]:
        """See `HostGroup`."""
        mine = _packed(item)
        with self._alive():
            length = torch.tensor([mine.numel()])
            lengths = [torch.zeros_like(length) for _ in self._ranks]
            dist.all_gather(lengths, length, group=self._named("messages"))
            room = int(max(lengths))
            padded = torch.zeros(room, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            all_of_them = [torch.empty_like(padded) for _ in self._ranks]
            dist.all_gather(all_of_them, padded, group=self._named("messages"))
        return [_unpacked(each) for each in all_of_them]

    def tell(self, item: Any) -> None:
        """See `HostGroup`."""
        data = _packed(item)
        with self._alive():
            self._send(torch.tensor([data.numel()]))
            self._send(data)

    def hear(self) -> Any:
        """See `HostGroup`."""
        length = torch.zeros(1, dtype=torch.int64)
        with self._alive():
            self._send(length)
            data = torch.empty(int(length), dtype=torch.uint8)
            self._send(data)
        return _unpacked(data)

    def start_sum(self, flat: torch.Tensor) -> Pending:
        """See `HostGroup`."""
        with self._alive():
            work = dist.all_reduce(flat, group=self._for(flat), async_op=True)
        assert work is not None
        return _Work(work, self._alive)

    def start_send(self, flat: torch.Tensor) -> Pending:
        """See `HostGroup`."""
        with self._alive():
            work = dist.isend(flat, self._ranks[0], group=self._for(flat))
        assert work is not None
        return _Work(work, self._alive)

    def start_receive(self, rank: int, flat: torch.Tensor) -> Pending:
        """See `HostGroup`."""
        with self._alive():
            work = dist.irecv(flat, self._ranks[rank], group=self._for(flat))
        assert work is not None
        return _Work(work, self._alive)

    def broadcast(self, flat: torch.Tensor) -> None:
        """See `HostGroup`."""
        with self._alive():
            dist.broadcast(flat, self._ranks[0], group=self._for(flat))

    def close(self) -> None:
        """See `HostGroup`; a second call does nothing."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            # The script may have ended torch.distributed, and these groups with it.
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _open(self, backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
        group = dist.new_group(
            self._ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _named(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise RuntimeError("the connections between them are closed")
        return self._groups[name]

    def _for(self, flat: torch.Tensor) -> dist.ProcessGroup:
        """The group for a tensor where it is: NCCL sends none from host memory."""
        on_device = self.of_devices and flat.device.type != "cpu"
        return self._named("cuda" if on_device else "cpu")

    def _send(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, self._ranks[0], group=self._named("messages"))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turns torch's errors into `HostLost`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise HostLost(
                f"process {self.rank} of this host lost another one ({_reason(error)}): the host "
                "leaves the line as a whole. Start its processes with torchrun --max-restarts, "
                "which starts all of them again once one has ended"
            ) from error


def _reason(error: Exception) -> str:
    """The fact in an error of torch, without the place in its code and the guess at the cause."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is")[0]


class _Work:
    """Torch's work, whose errors are ours."""

    def __init__(self, work: dist.Work, alive: Callable[[], AbstractContextManager[None]]) -> None:
        self._work = work
        self._alive = alive
        self.is_completed = work.is_completed

    def wait(self) -> None:
        with self._alive():
            self._work.wait()


def _packed(item: Any) -> torch.Tensor:
    # Pickle, as torch's own object collectives: both ends are processes of one launch.
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    # `load` stops at the end of the pickle: zeros may follow.
    return pickle.load(io.BytesIO(data.numpy().tobytes()))
