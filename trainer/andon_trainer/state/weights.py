"""The weights of modules: by which names they are known, their digest, and their replacement.

Workers compare `weights_digest`. docs/protocol-data.md specifies the bytes that are hashed, so that
a client in another language computes the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from andon.protocol.limits import PREFIX_BYTES
from andon_trainer.model.layout import module_prefixes
from andon_trainer.model.wrappers import named_modules
from andon_trainer.state.base import Base, head_of, raw_bytes
from andon_trainer.state.trees import outline

__all__ = [
    "DigestPart",
    "base_beside",
    "check_tensors",
    "digest_and_prefixes",
    "digest_of",
    "digest_parts",
    "named_state",
    "weights_digest",
    "write_tensors",
]


def named_state(modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer once, with its name, in the order of `state_dict`.

    With several modules names begin with `0.`, `1.` and so on. Where a part is compiled they are
    those of the original. The tensors are the modules' own. A tied tensor comes once, under its
    first name.
    """
    seen: set[int] = set()
    for prefix, root in zip(module_prefixes(modules), modules, strict=True):
        for path, module in named_modules(root):
            transient = module._non_persistent_buffers_set
            own: dict[str, torch.Tensor | None] = {
                **module._parameters,
                **{k: buffer for k, buffer in module._buffers.items() if k not in transient},
            }
            for name, tensor in own.items():
                # `state_dict` has tied tensors under each name; here they count once.
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield prefix + (f"{path}.{name}" if path else name), tensor


def weights_digest(modules: Sequence[nn.Module]) -> bytes:
    """The digest that a line has if the frozen parameters are its base; 32 bytes.

    See `digest_and_prefixes`.
    """
    trained = {id(tensor) for _, tensor in named_state(modules) if tensor.requires_grad}
    return digest_and_prefixes(modules, frozenset(), base=base_beside(modules, trained))[0]


def base_beside(modules: Sequence[nn.Module], trained: Collection[int]) -> Base:
    """The base of `modules`: their parameters whose ids are not in `trained`."""
    return Base(
        id(tensor)
        for _, tensor in named_state(modules)
        if isinstance(tensor, nn.Parameter) and tensor.numel() and id(tensor) not in trained
    )


def digest_and_prefixes(
    modules: Sequence[nn.Module],
    marked: Collection[int],
    outer: Optimizer | None = None,
    base: Base | None = None,
) -> tuple[bytes, bytes]:
    """SHA-256 of all parameters, and the first 8 bytes of the running digest after some of them.

    The first prefix in which two workers differ tells the first parameter in which they differ.

    For each parameter of `named_state` these bytes are hashed: name in UTF-8, 0x00, dtype
    (`float32`), 0x00, shape as decimals with commas, 0x00, elements little-endian and C-contiguous.
    In place of the elements of a parameter of the base there is their SHA-256. Buffers are left
    out: between two commits each worker has its own running statistics. If there is an outer
    optimizer, its momentum follows in the same way, as far as there is any, for the parameters in
    the same order, with `outer.` before each name.

    Args:
        modules: their parameters are hashed.
        marked: ids of the parameters that get a prefix.
        outer: the optimizer that applies windows of local steps, if there are any.
        base: the parameters that are not trained; None: all count as trained.

    Returns:
        The digest, 32 bytes, and the prefixes, concatenated.
    """
    digest, prefixes = hashlib.sha256(), bytearray()
    named = list(named_state(modules))
    hashes = {} if base is None else base.hashes(named)
    for name, tensor in named:
        if not isinstance(tensor, nn.Parameter):
            continue
        if id(tensor) in hashes:
            digest.update(head_of(name, tensor) + hashes[id(tensor)])
            continue
        _hash(digest, name, tensor)
        if id(tensor) in marked:
            prefixes += digest.copy().digest()[:PREFIX_BYTES]
    for name, tensor in named if outer is not None else ():
        momentum = outer.state.get(tensor, {}).get("momentum_buffer") if outer else None
        if momentum is not None:
            _hash(digest, f"outer.{name}", momentum)
    return digest.digest(), bytes(prefixes)


@dataclass(frozen=True, slots=True)
class DigestPart:
    """What one parameter adds to the digest of the weights."""

    head: bytes
    """Its name, type and shape, as they are hashed."""
    name: str
    base_hash: bytes
    """What is hashed in place of its elements; empty if these are."""


def digest_parts(modules: Sequence[nn.Module], base: Base) -> list[DigestPart]:
    """What `digest_of` needs beside the elements of the parameters that are trained."""
    named = list(named_state(modules))
    hashes = base.hashes(named)
    return [
        DigestPart(head_of(name, tensor), name, hashes.get(id(tensor), b""))
        for name, tensor in named
        if isinstance(tensor, nn.Parameter)
    ]


def digest_of(parts: Sequence[DigestPart], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The digest of weights whose elements lie in `tensors`, by name; 32 bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.head)
        digest.update(part.base_hash or raw_bytes(tensors[part.name], part.name))
    return digest.digest()


def _hash(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(head_of(name, tensor))
    digest.update(raw_bytes(tensor, name))


def check_tensors(modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors that do not fit `modules`.

    Raises:
        ValueError: a name, shape or dtype differs; the message names the first.
    """
    mine = dict(named_state(modules))
    for name in [*mine, *(name for name in tensors if name not in mine)]:
        here = outline(mine.get(name))
        there = outline(tensors.get(name))
        if here != there:
            raise ValueError(f"the state does not fit: {name} is {here} here and {there} there")


def write_tensors(modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors, which `check_tensors` has checked, into the modules' own."""
    with torch.no_grad():
        for name, tensor in named_state(modules):
            tensor.copy_(tensors[name])
