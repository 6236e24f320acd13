"""The base: the parameters that no worker trains, such as all but the adapters of LoRA.

Theory of operation. A base may be a thousand times as large as what is trained, and it does not
change. So its tensors are hashed once, and a checkpoint has them in a file of their own, which
later checkpoints of the run link to. But a script may change them after all: an encoder that
follows another by a moving average is frozen, too. So before a hash is used again its tensor is
looked at: its memory, torch's count of writes to it, and the sum of its bytes as 64-bit numbers,
which takes a fiftieth of the time of a SHA-256 and stays on the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from andon_trainer.state.trees import dtype_name, plain_tensor

__all__ = ["Base", "Named", "head_of", "looks", "raw_bytes", "sum_of_bytes"]

Named = Sequence[tuple[str, torch.Tensor]]
"""Tensors with their names."""


class Base:
    """Which parameters are the base, and the SHA-256 of each. Used by one thread."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """`ids`: of the parameters that no block of the layout has."""
        self._ids = frozenset(ids)
        self._known: dict[int, tuple[Any, bytes]] = {}
        """Of each tensor, how it looked when it was hashed, and the hash."""
        self.hashed = 0
        """How many tensors were hashed so far."""

    def __bool__(self) -> bool:
        """Whether there is any such parameter."""
        return bool(self._ids)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a part of the base."""
        return id(tensor) in self._ids

    def hashes(self, named: Named) -> dict[int, bytes]:
        """SHA-256 of the elements of those tensors that are the base's, 32 bytes each, by id."""
        mine = [(name, tensor) for name, tensor in named if tensor in self]
        found = {}
        for (name, tensor), look in zip(mine, looks([each for _, each in mine]), strict=True):
            before, digest = self._known.get(id(tensor), (None, b""))
            if before != look:
                digest = hashlib.sha256(raw_bytes(tensor, name)).digest()
                self.hashed += 1
                self._known[id(tensor)] = look, digest
            found[id(tensor)] = digest
        return found

    def digest(self, named: Named) -> bytes:
        """SHA-256 of the whole base, with the names, types and shapes; empty if there is none."""
        hashes = self.hashes(named)
        if not hashes:
            return b""
        digest = hashlib.sha256()
        for name, tensor in named:
            if id(tensor) in hashes:
                digest.update(head_of(name, tensor) + hashes[id(tensor)])
        return digest.digest()


def head_of(name: str, tensor: torch.Tensor) -> bytes:
    """What is hashed before a tensor's elements: its name, type and shape."""
    shape = ",".join(map(str, tensor.shape))
    return b"\0".join((name.encode(), dtype_name(tensor).encode(), shape.encode(), b""))


def raw_bytes(tensor: torch.Tensor, name: str) -> memoryview:
    """The elements, little-endian and C-contiguous, in host memory."""
    return plain_tensor(tensor, name).reshape(-1).view(torch.uint8).numpy().data


def looks(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Of each tensor, what differs if it was changed, also where torch counts no write: `.data`."""
    sums: dict[int, int] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.device == device]
        # One wait for each device.
        totals = torch.stack([sum_of_bytes(tensor) for tensor in here]).tolist()
        sums.update(zip(map(id, here), totals, strict=True))
    return [
        (
            tensor.data_ptr(),
            0 if tensor.is_inference() else tensor._version,
            tensor.dtype,
            tensor.shape,
            sums[id(tensor)],
        )
        for tensor in tensors
    ]


def sum_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bytes, as 64-bit numbers where it divides into such; int64, scalar."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = plain.numel() - plain.numel() % 8
    if plain.storage_offset() % 8:
        whole = 0
    words = plain[:whole].view(torch.int64)
    return words.sum() + plain[whole:].sum(dtype=torch.int64)
