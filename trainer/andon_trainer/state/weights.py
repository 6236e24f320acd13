"""The weights of some modules: their digest, and their bytes for a newcomer."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from andon.protocol.limits import PREFIX_BYTES
from andon_trainer.gradients.model_layout import module_prefixes
from andon_trainer.state.trees import (
    dtype_name,
    outline,
    pack_tensors,
    plain_tensor,
    unpack_tensors,
)

__all__ = [
    "check_tensors",
    "digest_and_prefixes",
    "install_state",
    "named_state",
    "pack_state",
    "weights_digest",
    "write_tensors",
]


def named_state(modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer once, named and in the order of `state_dict`.

    Names have `0.`, `1.` before them if there are several modules. The tensors are the modules'
    own; one that is tied comes under its first name.
    """
    seen: set[int] = set()
    for prefix, root in zip(module_prefixes(modules), modules, strict=True):
        for path, module in root.named_modules():
            transient = module._non_persistent_buffers_set
            own: dict[str, torch.Tensor | None] = {
                **module._parameters,
                **{k: buffer for k, buffer in module._buffers.items() if k not in transient},
            }
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield prefix + (f"{path}.{name}" if path else name), tensor


def weights_digest(modules: Sequence[nn.Module]) -> bytes:
    """SHA-256 of all parameters, trained or frozen, 32 bytes; see `digest_and_prefixes`."""
    return digest_and_prefixes(modules, frozenset())[0]


def digest_and_prefixes(
    modules: Sequence[nn.Module], marked: Collection[int]
) -> tuple[bytes, bytes]:
    """SHA-256 of all parameters, and the running digest's first 8 bytes after each marked one.

    Where the prefixes of two workers begin to differ is the first parameter that does. What is
    hashed, for each parameter of `named_state`: name in UTF-8, 0x00, dtype (`float32`), 0x00, the
    shape as decimals with commas, 0x00, the elements little-endian and C-contiguous. Buffers are
    left out: running statistics are each worker's own.

    Args:
        modules: whose parameters.
        marked: ids of parameters.

    Returns:
        The digest, 32 bytes; the prefixes, one after the other.
    """
    digest, prefixes = hashlib.sha256(), bytearray()
    for name, tensor in named_state(modules):
        if not isinstance(tensor, nn.Parameter):
            continue
        shape = ",".join(map(str, tensor.shape))
        digest.update(b"\0".join((name.encode(), dtype_name(tensor).encode(), shape.encode(), b"")))
        digest.update(_raw(tensor, name))
        if id(tensor) in marked:
            prefixes += digest.copy().digest()[:PREFIX_BYTES]
    return digest.digest(), bytes(prefixes)


def pack_state(modules: Sequence[nn.Module]) -> bytes:
    """All parameters and persistent buffers, as safetensors."""
    return pack_tensors(dict(named_state(modules)))


def install_state(modules: Sequence[nn.Module], data: bytes) -> None:
    """Writes what `pack_state` packed into modules of the same structure: all of it, or nothing.

    Raises:
        ValueError: `data` is no safetensors, or a name, shape or dtype differs.
    """
    tensors = unpack_tensors(data)
    check_tensors(modules, tensors)
    write_tensors(modules, tensors)


def check_tensors(modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors that are not those of `modules`: the first that differs is named.

    Raises:
        ValueError: a name, shape or dtype differs.
    """
    mine = dict(named_state(modules))
    for name in [*mine, *(name for name in tensors if name not in mine)]:
        here = outline(mine.get(name))
        there = outline(tensors.get(name))
        if here != there:
            raise ValueError(f"the state does not fit: {name} is {here} here and {there} there")


def write_tensors(modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies checked tensors into the modules' own."""
    with torch.no_grad():
        for name, tensor in named_state(modules):
            tensor.copy_(tensors[name])


def _raw(tensor: torch.Tensor, name: str) -> memoryview:
    return plain_tensor(tensor, name).reshape(-1).view(torch.uint8).numpy().data
