"""Reduction operations by element type: what is defined, and how it is computed.

Elements are reduced in their own type, from the lowest rank to the highest, as
docs/protocol-sessions.md says. A mean is the sum divided by the number of ranks; of integers it is
truncated towards zero, as NCCL does. For `bool` a sum is "or" and a product is "and".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["TorchReduce", "reduction_of"]

_BITWISE = frozenset({"band", "bor", "bxor"})
_ORDERED = frozenset({"min", "max"})
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_NUMPY = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_WIDE_UNSIGNED = {
    dtype: kind
    for name, kind in (("uint16", np.uint16), ("uint32", np.uint32), ("uint64", np.uint64))
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""Types with which PyTorch does not compute."""
_COMPUTED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    *_WIDE_UNSIGNED,
}  # fmt: skip


def reduction_of(op: Any, dtype: torch.dtype) -> str:
    """The operation's name in a call, such as `sum`.

    Args:
        op: a `ReduceOp`, or one of its constants.
        dtype: of the elements.

    Raises:
        NotImplementedError: it is not defined for the type, or not at all.
    """
    name = _name_of(op)
    undefined = (
        dtype not in _COMPUTED
        or (name in _BITWISE and (dtype.is_floating_point or dtype.is_complex))
        or (name in _ORDERED and dtype.is_complex)
        or (name == "avg" and dtype is torch.bool)
    )
    if undefined:
        raise NotImplementedError(f"andon has no reduction {name} of {dtype}")
    return name


def _name_of(op: Any) -> str:
    # In this order: `ReduceOp` has the comparison, its constants don't, and `in` would ask them.
    for name in _FUNCTIONS:
        if op == getattr(ReduceOp, name.upper()):
            return name
    if op == ReduceOp.PREMUL_SUM:
        raise NotImplementedError(
            "andon has no reduction PREMUL_SUM: multiply the tensor, and use SUM"
        )
    raise NotImplementedError(f"andon has no reduction {op}")


class TorchReduce:
    """Reduces by PyTorch's arithmetic; see `andon_trainer.core.peer_work.Reduce`."""

    def __init__(self, reduction: str, dtype: torch.dtype, ranks: int) -> None:
        """Takes an operation that `reduction_of` named.

        Args:
            reduction: the operation.
            dtype: of the elements.
            ranks: by how many a mean is divided.
        """
        self._dtype = dtype
        self._ranks = ranks
        self._mean = reduction == "avg"
        self._function: Callable[..., Any] = (
            _NUMPY[reduction] if dtype in _WIDE_UNSIGNED else _FUNCTIONS[reduction]
        )

    def __call__(self, out: memoryview, inputs: Sequence[memoryview], *, last: bool) -> None:
        """Writes the reduction of `inputs`, left to right, to `out`."""
        if not len(out):
            return
        if self._dtype in _WIDE_UNSIGNED:
            self._reduce_by_numpy(out, inputs, last=last)
            return
        target = _tensor_of(out, self._dtype)
        tensors = [_tensor_of(each, self._dtype) for each in inputs]
        # A result that is written where a later input lies would be read as that input.
        shared = any(each.data_ptr() == target.data_ptr() for each in tensors[2:])
        result = torch.empty_like(target) if shared else target
        if len(tensors) == 1:
            result.copy_(tensors[0])
        else:
            self._function(tensors[0], tensors[1], out=result)
        for each in tensors[2:]:
            self._function(result, each, out=result)
        if self._mean and last:
            if self._dtype.is_floating_point or self._dtype.is_complex:
                result.div_(self._ranks)
            else:
                result.div_(self._ranks, rounding_mode="trunc")
        if shared:
            target.copy_(result)

    def _reduce_by_numpy(
        self, out: memoryview, inputs: Sequence[memoryview], *, last: bool
    ) -> None:
        kind = _WIDE_UNSIGNED[self._dtype]
        result = np.frombuffer(inputs[0], kind).copy()
        for each in inputs[1:]:
            self._function(result, np.frombuffer(each, kind), out=result)
        if self._mean and last:
            np.floor_divide(result, kind(self._ranks), out=result)
        np.frombuffer(out, kind)[:] = result


def _tensor_of(view: memoryview, dtype: torch.dtype) -> Tensor:
    """A view of bytes as a tensor; of bytes that can't be written, a copy."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
