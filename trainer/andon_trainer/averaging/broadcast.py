"""Broadcasts of rank 0's tensors: how they travel as bytes, and BatchNorm's running statistics.

A broadcast is one vector of bytes. It begins with a digest of the call's name and of each tensor's
name, dtype and shape, so that workers whose calls do not match find out before a byte is used. Any
dense dtype passes, bit for bit.

Running statistics: each worker's forward moves its own running means and variances by its own
samples. Left alone they move apart, and with them every evaluation, early stop and scheduler that
reads a loss. So in each step rank 0's follow the gradients as one more exchange of the round, and
all workers load them when the step is committed, as DistributedDataParallel does before each
forward. They are no part of the weights' digest (decision 6): the next forward moves them again.
`running_statistics` decides when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from andon_trainer.averaging.averaging import Averaging
from andon_trainer.core.calls import Bytes, Call
from andon_trainer.model.wrappers import named_modules

__all__ = ["HEAD_BYTES", "NormBuffers", "RunningStatistics", "pack", "unpack"]

_NAME = "running statistics"
HEAD_BYTES = 32
"""Length of the digest at the beginning of a broadcast."""


def pack(call: str, tensors: Mapping[str, torch.Tensor], *, filled: bool) -> Bytes:
    """A broadcast of `tensors`.

    Args:
        call: the name of the call, which is part of the digest.
        tensors: dense, by name.
        filled: whether to copy the values; if not there is only room for them behind the digest.

    Raises:
        ValueError: a tensor is sparse or quantised.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is sparse or quantised: only dense tensors can be sent")
    outlines = (f"{name} {each.dtype} {tuple(each.shape)}" for name, each in tensors.items())
    head = hashlib.sha256("\n".join((call, *outlines)).encode()).digest()
    data = np.zeros(HEAD_BYTES + sum(each.nbytes for each in tensors.values()), dtype=np.uint8)
    data[:HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    at = HEAD_BYTES
    for tensor in tensors.values() if filled else ():
        # Conjugate and negative views are lazy: their bytes are not yet their values.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data[at : at + plain.nbytes] = plain.reshape(-1).view(torch.uint8).numpy()
        at += plain.nbytes
    return data


def unpack(data: Bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a broadcast into the tensors that it was packed for, in place."""
    at = HEAD_BYTES
    with torch.no_grad():
        for tensor in tensors.values():
            raw = torch.from_numpy(data[at : at + tensor.nbytes].copy())
            if tensor.numel():  # Torch can't view zero bytes as another dtype.
                tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))
            at += tensor.nbytes


class NormBuffers:
    """The running statistics of all normalisation layers of some modules, as flat vectors."""

    def __init__(self, modules: Sequence[nn.Module], *, integers: bool = False) -> None:
        """Finds the layers; `integers`: leaves floats out."""
        layers = {
            id(layer): (name, layer)
            for module in modules
            for name, layer in named_modules(module)
            if isinstance(layer, _NormBase)
        }
        self._layers = list(layers.values())
        self._integers = integers

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._buffers())

    def read(self) -> dict[str, torch.Tensor]:
        """A copy: one vector for each dtype, since a GPU's copy of each small buffer takes long.

        All on the device of the first buffer: a model may be on several.
        """
        by_dtype: dict[str, list[torch.Tensor]] = {}
        buffers = self._buffers()
        for buffer in buffers:
            part = buffer.reshape(-1).to(buffers[0].device)
            by_dtype.setdefault(str(buffer.dtype), []).append(part)
        return {name: torch.cat(parts) for name, parts in by_dtype.items()}

    def write(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Sets what `read` returned, or the vectors of some dtypes of it."""
        for name, values in flat.items():
            mine = [buffer for buffer in self._buffers() if str(buffer.dtype) == name]
            parts = torch.split(values, [buffer.numel() for buffer in mine])
            with torch.no_grad():
                for buffer, part in zip(mine, parts, strict=True):
                    buffer.copy_(part.reshape(buffer.shape))

    def keep_variances_positive(self) -> None:
        """Sets variances below 0 to 0."""
        for _, layer in self._layers:
            if layer.running_var is not None:
                layer.running_var.clamp_(min=0)

    def name_at(self, element: int) -> str:
        """The layer that has float number `element` of those that `read` returns, by dtype."""
        order = list(self.read())
        floats = [
            (order.index(str(buffer.dtype)), name, buffer.numel())
            for name, layer in self._layers
            for buffer in layer.buffers(recurse=False)
            if buffer.dtype.is_floating_point
        ]
        for _, name, elements in sorted(floats, key=lambda each: each[0]):
            if element < elements:
                return name or "the model"
            element -= elements
        raise IndexError(f"there are {element} elements fewer")

    def _buffers(self) -> list[torch.Tensor]:
        return [
            buffer
            for _, layer in self._layers
            for buffer in layer.buffers(recurse=False)
            if not (self._integers and buffer.dtype.is_floating_point)
        ]


class RunningStatistics:
    """Running statistics that become rank 0's on all workers."""

    def __init__(self, modules: Sequence[nn.Module], *, integers: bool = False) -> None:
        """Finds the layers; `integers`: leaves floats out."""
        self._buffers = NormBuffers(modules, integers=integers)
        self._arrived: Bytes | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._buffers)

    def exchange(
        self, averaging: Averaging, made: Mapping[str, torch.Tensor] | None = None
    ) -> bool:
        """Brings rank 0's here, in the last exchange of the round; False if the round is void.

        `made`: what the step made of them, by dtype; None: what they are now.
        """
        source, values = averaging.rank == 0, self._buffers.read()
        if made is not None:
            values = {name: made[name] for name in values}
        # Its bytes are rank 0's only at the end of the exchange. `load_arrived` waits for the
        # commit.
        self._arrived = data = pack(_NAME, values, filled=source)
        return averaging.broadcast(Call(name=_NAME, data=data, head_bytes=HEAD_BYTES), last=True)

    def load_arrived(self) -> None:
        """Loads what came with the step. Call it once the step is committed, and not before.

        A void step must leave the statistics as they were, as it does the weights.
        """
        # Taken away: what came with one round is loaded by that round's commit alone.
        data, self._arrived = self._arrived, None
        if data is None:
            return
        flat = self._buffers.read()
        unpack(data, flat)
        self._buffers.write(flat)

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""
        self._arrived = None
