"""What PyTorch asks a process group besides collectives: its name, its devices, its end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from andon_torch.autoload import BACKEND
from andon_torch.works import Waitable
from andon_trainer.core import peer_work

__all__ = ["Caller", "GroupIdentity"]

_Base: Any = dist.ProcessGroup
"""Its methods are overloaded; ours take what all the overloads do."""


class Caller(Protocol):
    """Begins calls of one group; see `andon_trainer.peers`."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks of the session."""

    def begin(self, work: peer_work.Work, *, awaited: bool = False) -> Waitable:
        """Begins a call; never blocks. `awaited`: the caller waits for it at once."""


class GroupIdentity(_Base):  # type: ignore[misc]  # see _Base
    """A process group that answers PyTorch's questions, and has no collectives yet.

    PyTorch also asks it as if it were a backend of its own: `_get_backend` is the group itself.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self, caller: Caller, name: str, timeout: timedelta, on_shutdown: Callable[[], None]
    ) -> None:
        """Takes a group of a session that was formed; see `AndonProcessGroup`."""
        super().__init__(caller.rank, len(caller.ranks))
        self._caller = caller
        self._name = name
        self._timeout = timeout
        self._on_shutdown: Callable[[], None] | None = on_shutdown
        self._begun = 0

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """The backend's name."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name; PyTorch's own getter asks a C++ backend."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it moves; PyTorch's own getter lists backends of C++."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        """What moves a device's tensors: the group itself.

        Raises:
            RuntimeError: nothing does.
        """
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"the backend andon moves no tensors of {device.type}")
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may take from now on."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Ends the group, and the session with its last group."""
        ending, self._on_shutdown = self._on_shutdown, None
        if ending is not None:
            ending()

    abort = shutdown

    def _set_sequence_number_for_group(self) -> None:
        """Calls are counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        """How many calls this rank has begun."""
        return self._begun

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether it makes tensors in memory of its own."""
        return False
