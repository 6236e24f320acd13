"""Tensors as the flat bytes that collectives move, and back.

Theory of operation. A collective reads and writes the memory of contiguous tensors of the processor
as it is. All others are staged: what a call takes from them is copied into memory of its own before
it begins, and what it gives to them is copied back, *landed*, once it has ended.

Tensors of a GPU are staged in pinned memory by a stream of the staging's own. It waits for what the
script's current stream has been given so far, so inputs are complete, and outputs are not written
before their last reader is done. Both copies are awaited on the processor: the peers read the
memory as soon as the call begins, and whoever waits for the call may use the result in any stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Staging", "bytes_of", "check_tensor", "name_of"]

_NAMES = {
    dtype: name
    for name in (
        "bool",
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The types whose elements are whole bytes. An older PyTorch may lack some."""
_DEVICES = frozenset({"cpu", "cuda"})


def name_of(dtype: torch.dtype) -> str:
    """The type's name in a call, such as `float32`."""
    return _NAMES[dtype]


def check_tensor(tensor: Tensor) -> None:
    """Refuses what can't be exchanged, before anything of the call is sent.

    Raises:
        NotImplementedError: it is sparse or quantised, or of an unknown type or device.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise NotImplementedError(
            f"andon exchanges dense tensors, and this one is {what}: use tensor.to_dense()"
        )
    if tensor.dtype not in _NAMES:
        raise NotImplementedError(
            f"andon can't exchange elements of {tensor.dtype}: convert them, "
            "or send tensor.view(torch.uint8)"
        )
    if tensor.device.type not in _DEVICES:
        raise NotImplementedError(
            f"andon exchanges tensors of CPUs and CUDA devices, and this one is on {tensor.device}"
        )


class Staging:
    """The memory of one call: the tensors' own, or copies that land when the call has ended."""

    def __init__(self) -> None:
        """Stages nothing yet."""
        self._landings: list[tuple[Tensor, Tensor]] = []
        self._events: list[Any] = []

    @property
    def lands(self) -> bool:
        """Whether `land` has something to do."""
        return bool(self._landings)

    def gives(self, tensor: Tensor) -> memoryview:
        """The elements of an input."""
        return bytes_of(tensor if _is_direct(tensor) else self._copied(tensor.detach()))

    def takes(self, tensor: Tensor) -> memoryview:
        """Memory for the elements of an output."""
        if _is_direct(tensor):
            return bytes_of(tensor)
        tensor = tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            _order_after_script(tensor)
        self._landings.append((tensor, host))
        return bytes_of(host)

    def changes(self, tensor: Tensor) -> memoryview:
        """The elements of a tensor that is input and output."""
        if _is_direct(tensor):
            return bytes_of(tensor)
        tensor = tensor.detach()
        host = self._copied(tensor)
        self._landings.append((tensor, host))
        return bytes_of(host)

    def ready(self) -> None:
        """Waits until all inputs are in the processor's memory."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def land(self) -> None:
        """Copies outputs that were staged to their tensors. Call it once the call has ended."""
        devices = set()
        for tensor, host in self._landings:
            if tensor.is_cuda:
                devices.add(tensor.device)
                with torch.cuda.stream(_side_stream(tensor.device)):
                    tensor.copy_(host, non_blocking=True)
            else:
                tensor.copy_(host)
        self._landings.clear()
        for device in devices:
            _side_stream(device).synchronize()

    def _copied(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            # Of the copy's own memory even where `contiguous` would return the tensor itself.
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        _order_after_script(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = _side_stream(tensor.device)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # it has none
            event.record(stream)
        self._events.append(event)
        return host


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of one GPU on which tensors are staged."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # it has none


def _order_after_script(tensor: Tensor) -> None:
    """Has the side stream wait for what the script's stream has been given so far."""
    stream = _side_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    # The script may drop the tensor before the side stream is done with its memory.
    tensor.record_stream(stream)


def _is_direct(tensor: Tensor) -> bool:
    """Whether the tensor's memory is its elements in order, within the processor's reach."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the processor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
