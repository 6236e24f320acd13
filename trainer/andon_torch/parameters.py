"""Finds the parameter whose gradient an element of an exchanged tensor is.

Theory of operation. PyTorch does not tell a process group what its tensors are: a bucket of
DistributedDataParallel holds many gradients in a row, and FSDP2's input the shards of several for
all ranks. So the process's live objects are searched, once, when a bad value was found:

* FSDP2's parameter groups know their shards' lengths. The one that is being reduced is known by its
  state, and the element's place by arithmetic.
* A gradient may be a view of the exchanged tensor; then the memory's address tells.
* Else the exchanged tensor has a copy of the gradient somewhere, perhaps divided by the number of
  ranks. Each gradient that is not finite is tried: where its first bad element is the tensor's, do
  the other elements agree? If none does, and only one gradient is bad, it is that one.

Nothing here calls into DistributedDataParallel: the thread that waits may hold its lock.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Place", "find_parameter"]


@dataclass(frozen=True, slots=True)
class Place:
    """An element of a parameter."""

    parameter: str
    element: tuple[int, ...]


def find_parameter(tensor: Tensor, element: int) -> Place | None:
    """The parameter of an element of a tensor that is exchanged; None: it is not known.

    Args:
        tensor: what this rank gives to a reduction.
        element: the index of a bad element, in order.
    """
    objects = gc.get_objects()
    gradients = list(_gradients(objects))
    return (
        _in_shards(objects, tensor, element)
        or _in_memory(gradients, tensor, element)
        or _by_content(gradients, tensor, element)
    )


def _gradients(objects: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Names and gradients of the parameters of all live models."""
    modules = [each for each in objects if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    for module in modules:
        if id(module) in inner:
            continue  # A part of another one, which names it whole.
        if issubclass(type(module), DistributedDataParallel):
            module = module.module
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                yield name, _local(gradient).detach()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _in_memory(gradients: list[tuple[str, Tensor]], tensor: Tensor, element: int) -> Place | None:
    storage = tensor.untyped_storage().data_ptr()
    at = int(tensor.storage_offset()) + element
    for name, gradient in gradients:
        if (
            gradient.untyped_storage().data_ptr() == storage
            and gradient.dtype is tensor.dtype
            and gradient.storage_offset() <= at < gradient.storage_offset() + gradient.numel()
        ):
            return Place(name, _index(gradient, at - int(gradient.storage_offset())))
    return None


def _index(tensor: Tensor, offset: int) -> tuple[int, ...]:
    """The index of the element that lies `offset` elements behind a dense tensor's first one."""
    found = [0] * tensor.dim()
    for dimension in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.shape[dimension] > 1:
            found[dimension], offset = divmod(offset, tensor.stride(dimension))
    return tuple(found)


def _by_content(gradients: list[tuple[str, Tensor]], tensor: Tensor, element: int) -> Place | None:
    flat = tensor.reshape(-1)
    bad: list[tuple[str, Tensor]] = []
    for name, gradient in gradients:
        # In the order of memory, as buckets have it.
        order = _dense(gradient)
        found = (~torch.isfinite(order)).nonzero()
        if len(found) and not any(each[1] is gradient for each in bad):
            bad.append((name, gradient))
            first = int(found[0])
            start = element - first
            if 0 <= start <= flat.numel() - order.numel() and _agree(
                flat[start : start + order.numel()], order
            ):
                return Place(name, _index_of(gradient, first))
    if len(bad) == 1:
        name, gradient = bad[0]
        first = int((~torch.isfinite(_dense(gradient))).nonzero()[0])
        return Place(name, _index_of(gradient, first))
    return None


def _dense(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order in which they lie in memory, if it has no gaps."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def _index_of(tensor: Tensor, position: int) -> tuple[int, ...]:
    """The index of an element that `_dense` has at `position`."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.is_contiguous():
        order = list(range(tensor.dim()))
    found = [0] * tensor.dim()
    for dimension in reversed(order):
        position, found[dimension] = divmod(position, tensor.shape[dimension])
    return tuple(found)


def _agree(copied: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor is a gradient times some number, where the gradient is finite."""
    finite = torch.isfinite(gradient)
    if not torch.equal(torch.isfinite(copied), finite):
        return False
    ours, theirs = copied[finite].double(), gradient[finite].to(copied.dtype).double()
    scale = theirs.abs().max() if theirs.numel() else torch.zeros(())
    if not float(scale):
        return not bool(ours.any())
    factor = ours[theirs.abs().argmax()] / theirs[theirs.abs().argmax()]
    return torch.allclose(ours, theirs * factor, rtol=1e-2, atol=1e-3 * float(ours.abs().max()))


def _in_shards(objects: list[Any], tensor: Tensor, element: int) -> Place | None:
    """The place of an element of what FSDP2 reduces."""
    for each in objects:
        if type(each).__name__ != "FSDPParamGroup":
            continue
        state = getattr(getattr(each, "_training_state", None), "name", "")
        if state != "POST_BACKWARD" or getattr(each, "_post_reduce_event", None) is not None:
            continue
        parameters = [
            one for one in each.fsdp_params if getattr(one.sharded_param, "requires_grad", False)
        ]
        for chosen in (parameters, each.fsdp_params):
            lengths = [one.padded_sharded_param_size.numel() for one in chosen]
            if place := _in_group(chosen, lengths, tensor, element):
                return place
    return None


def _in_group(
    parameters: list[Any], lengths: list[int], tensor: Tensor, element: int
) -> Place | None:
    """The place in one parameter group, whose shards have these lengths."""
    length = sum(lengths)
    if not length:
        return None
    mesh = parameters[0].mesh_info
    if tensor.numel() == length:  # HSDP's second reduction, of this rank's shards.
        shard, within = getattr(mesh, "shard_mesh_rank", 0), element
    elif tensor.numel() == length * getattr(mesh, "shard_mesh_size", 1):
        shard, within = divmod(element, length)
    else:
        return None
    for one, size in zip(parameters, lengths, strict=True):
        if within < size:
            return _in_parameter(one, shard, within)
        within -= size
    return None


def _in_parameter(one: Any, shard: int, within: int) -> Place | None:
    """The element of a parameter that is at `within` of one of its shards."""
    shape = list(one.padded_sharded_param_size)
    dimension = one.fsdp_placement.dim
    index = (
        [int(each) for each in torch.unravel_index(torch.tensor(within), shape)] if shape else []
    )
    if index:
        index[dimension] += shard * shape[dimension]
    name = one._param_fqn or one._module_info.param_name
    return Place(str(name), tuple(index))
