"""The state: a replica's weights as a digest and as bytes, and trees of state without pickle.

Theory of operation. `weights_digest` is what workers compare; docs/protocol.md specifies its text,
so that a client in another language computes the same. `pack_state` is what travels to a newcomer:
safetensors, checked whole before anything is written. `split_tree` takes what `state_dict()` of an
optimizer or scheduler returns apart into tensors (for safetensors) and plain values (for JSON).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from andon.protocol.limits import PREFIX_BYTES
from andon_trainer.model_layout import module_prefixes

__all__ = [
    "check_tensors",
    "digest_and_prefixes",
    "install_state",
    "join_tree",
    "named_state",
    "pack_state",
    "pack_tensors",
    "require_keepable",
    "split_tree",
    "unpack_tensors",
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
        digest.update(
            b"\0".join((name.encode(), _dtype_name(tensor).encode(), shape.encode(), b""))
        )
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
        here = _outline(mine.get(name))
        there = _outline(tensors.get(name))
        if here != there:
            raise ValueError(f"the state does not fit: {name} is {here} here and {there} there")


def write_tensors(modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies checked tensors into the modules' own."""
    with torch.no_grad():
        for name, tensor in named_state(modules):
            tensor.copy_(tensors[name])


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as safetensors; sparse and quantised ones are refused.

    Raises:
        ValueError: a tensor has no plain elements.
    """
    packed: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = _plain(tensor, name)
        storage = plain.untyped_storage()
        # safetensors takes no two tensors of one storage.
        if storage.nbytes() != plain.nbytes or (plain.nbytes and storage.data_ptr() in storages):
            plain = plain.clone(memory_format=torch.contiguous_format)
        storages.add(plain.untyped_storage().data_ptr())
        packed[name] = plain
    return safetensors.torch.save(packed)


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of `data`, in host memory.

    Raises:
        ValueError: it is no safetensors.
    """
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"this is no state in the safetensors format: {error}") from error


def split_tree(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Takes nested dicts, lists and tuples apart, into JSON's values and named tensors.

    Returns:
        What `json.dumps` takes, and the tensors it refers to.

    Raises:
        TypeError: something in it is neither a tensor nor a plain value.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, "", tensors), tensors


def require_keepable(tree: Any) -> None:
    """Refuses what `split_tree` and `pack_tensors` would refuse; copies nothing.

    Raises:
        TypeError: something in it is neither a tensor nor a plain value, or a tensor is sparse,
            quantised, or of a type that safetensors lacks. It is named.
    """
    skeleton, tensors = split_tree(tree)
    json.dumps(skeleton)
    for name, tensor in tensors.items():
        try:
            _require_dense(tensor, name)
            pack_tensors({name: torch.empty(0, dtype=tensor.dtype)})
        except (ValueError, KeyError, SafetensorError) as error:
            raise TypeError(f"{name} is a {_outline(tensor)} tensor: {error}") from error


def join_tree(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Puts together what `split_tree` took apart.

    Raises:
        ValueError: the skeleton is not of `split_tree`'s making, or a tensor is missing.
    """
    if isinstance(skeleton, list):
        return [join_tree(part, tensors) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    try:
        ((what, inside),) = skeleton.items()
        if what == "tensor":
            return tensors[inside]
        if what == "tuple":
            return tuple(join_tree(part, tensors) for part in inside)
        if what == "dict":
            return {join_tree(key, tensors): join_tree(part, tensors) for key, part in inside}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a saved state is damaged: {error}") from error
    raise ValueError(f"a saved state is damaged: it has an unknown part {what!r}")


def _split(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        name = path or "tensor"
        while name in tensors:
            name += "'"
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Mapping):
        return {
            "dict": [
                [_split(key, path, tensors), _split(part, _below(path, key), tensors)]
                for key, part in tree.items()
            ]
        }
    if isinstance(tree, list | tuple):
        parts = [_split(part, _below(path, index), tensors) for index, part in enumerate(tree)]
        return parts if isinstance(tree, list) else {"tuple": parts}
    raise TypeError(
        f"{path or 'the state'} is a {type(tree).__name__}: state_dict() may hold tensors, "
        "numbers, strings, lists, tuples and dicts, since nothing is pickled"
    )


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _outline(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{_dtype_name(tensor)}{list(tensor.shape)}"


def _require_dense(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"{name} is sparse or quantised: only dense tensors can be kept")


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's values in host memory, C-contiguous."""
    _require_dense(tensor, name)
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _raw(tensor: torch.Tensor, name: str) -> memoryview:
    return _plain(tensor, name).reshape(-1).view(torch.uint8).numpy().data
