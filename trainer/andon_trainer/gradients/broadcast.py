"""Bundles: tensors as one vector of bytes, after a digest of what they are.

The digest is of the call's name and of each tensor's name, type and shape, so that workers whose
calls do not pair find out before a byte is taken over. Any dense type passes, bit for bit.

Running statistics: what BatchNorm and its kin gather, rank 0's on every worker.

Theory of operation. Each worker's forward moves its own running means and variances by its own
samples. Left alone they part, and with them every evaluation, early stop and scheduler that looks
at a loss. So in each step rank 0's follow the gradients, as one more exchange of the round, and all
workers take them over at the step's commit, as DistributedDataParallel does by default before each
forward. They are no part of the weights' digest (decision 6): a forward moves them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from andon_trainer.core.calls import Bytes, Call

__all__ = ["HEAD_BYTES", "RunningStatistics", "pack", "unpack"]


HEAD_BYTES = 32
"""Length of the digest that a bundle begins with."""


def pack(call: str, tensors: Mapping[str, torch.Tensor], *, filled: bool) -> Bytes:
    """A bundle of `tensors`, or just room for one behind its digest if it is not `filled`.

    Raises:
        ValueError: a tensor is sparse or quantised.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is sparse or quantised: only dense tensors can be sent")
    outlines = (f"{name} {each.dtype} {tuple(each.shape)}" for name, each in tensors.items())
    head = hashlib.sha256("\n".join((call, *outlines)).encode()).digest()
    bundle = np.zeros(HEAD_BYTES + sum(each.nbytes for each in tensors.values()), dtype=np.uint8)
    bundle[:HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    at = HEAD_BYTES
    for tensor in tensors.values() if filled else ():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        bundle[at : at + plain.nbytes] = plain.reshape(-1).view(torch.uint8).numpy()
        at += plain.nbytes
    return bundle


def unpack(bundle: Bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a bundle into the tensors that it was made for, where they are."""
    at = HEAD_BYTES
    with torch.no_grad():
        for tensor in tensors.values():
            raw = torch.from_numpy(bundle[at : at + tensor.nbytes].copy())
            if tensor.numel():  # no other type's view of nothing
                tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))
            at += tensor.nbytes


_SEQUENCE = 1
"""The gradients' exchange is number 0."""


class RunningStatistics:
    """Those of all normalisation layers of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Notes where they are."""
        layers = {
            id(layer): layer
            for module in modules
            for layer in module.modules()
            if isinstance(layer, _NormBase)
        }
        self._layers = list(layers.values())
        self._arrived: Bytes | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._buffers())

    def call(self, *, source: bool) -> Call:
        """The exchange of a round that brings rank 0's: what it sends, or room for it."""
        flat = self._flat()
        self._arrived = data = pack("running statistics", flat, filled=source)
        return Call(name="running statistics", sequence=_SEQUENCE, data=data, head_bytes=HEAD_BYTES)

    def take_over(self) -> None:
        """The step is committed: what came with it is put in place."""
        data, self._arrived = self._arrived, None
        if data is None:
            return
        flat = self._flat()
        unpack(data, flat)
        for name, kind in flat.items():
            mine = [buffer for buffer in self._buffers() if str(buffer.dtype) == name]
            parts = torch.split(kind, [buffer.numel() for buffer in mine])
            with torch.no_grad():
                for buffer, part in zip(mine, parts, strict=True):
                    buffer.copy_(part.reshape(buffer.shape))

    def drop(self) -> None:
        """The round is void."""
        self._arrived = None

    def _flat(self) -> dict[str, torch.Tensor]:
        """One vector for each type: a copy to or from a GPU for each buffer would take long."""
        kinds: dict[str, list[torch.Tensor]] = {}
        for buffer in self._buffers():
            kinds.setdefault(str(buffer.dtype), []).append(buffer.reshape(-1))
        return {name: torch.cat(parts) for name, parts in kinds.items()}

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
