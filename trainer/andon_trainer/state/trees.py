"""Trees of state as JSON and safetensors, without pickle.

Theory of operation. What `state_dict()` of an optimizer or scheduler returns is a tree of dicts,
lists, tuples, tensors and plain values. `split_tree` separates it into a skeleton for JSON and
named tensors for safetensors; `join_tree` rebuilds it. In the skeleton a list is a JSON list, and
everything that JSON lacks is an object with one key: `{"tensor": name}`, `{"tuple": [...]}`, and
`{"dict": [[key, value], ...]}`, whose keys need not be strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

__all__ = [
    "concatenated",
    "dtype_name",
    "elements_in",
    "join_tree",
    "outline",
    "pack_tensors",
    "plain_tensor",
    "require_keepable",
    "split_tree",
    "unpack_tensors",
]

_ALIGNMENT = 8
"""Of the elements in a file; also the bytes of its header's length."""


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as bytes in the safetensors format.

    Raises:
        ValueError: a tensor is sparse or quantised.
    """
    packed: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = plain_tensor(tensor, name)
        storage = plain.untyped_storage()
        # safetensors refuses tensors that share a storage, or use a part of theirs.
        if storage.nbytes() != plain.nbytes or (plain.nbytes and storage.data_ptr() in storages):
            plain = plain.clone(memory_format=torch.contiguous_format)
        storages.add(plain.untyped_storage().data_ptr())
        packed[name] = plain
    return safetensors.torch.save(packed)


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in `data`, in host memory.

    Raises:
        ValueError: `data` is not in the safetensors format.
    """
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"this is not a state in the safetensors format: {error}") from error


def concatenated(first: bytes, second: bytes) -> bytes:
    """Two files in the safetensors format as one: the second's elements come last."""
    header, start = _header(first)
    more, second_start = _header(second)
    shift = len(first) - start
    for entry in more.values():
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    text = json.dumps({**header, **more}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    length = len(text).to_bytes(_ALIGNMENT, "little")
    parts = memoryview(first)[start:], memoryview(second)[second_start:]
    return b"".join((length, text, *parts))


def elements_in(data: bytes) -> memoryview:
    """The elements of all tensors in a file in the safetensors format, without its header."""
    return memoryview(data)[_header(data)[1] :]


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header of a file in the safetensors format, and where its elements begin."""
    start = _ALIGNMENT + int.from_bytes(data[:_ALIGNMENT], "little")
    header: dict[str, Any] = json.loads(data[_ALIGNMENT:start])
    return header, start


def split_tree(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Separates nested dicts, lists and tuples into a skeleton and named tensors.

    Returns:
        A skeleton for `json.dumps`, and the tensors that it names.

    Raises:
        TypeError: the tree holds something that is neither a tensor nor a plain value.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, "", tensors), tensors


def require_keepable(tree: Any) -> None:
    """Refuses what `split_tree` and `pack_tensors` would refuse, without copying a tensor.

    Raises:
        TypeError: the tree holds something that is neither a tensor nor a plain value, or a tensor
            that is sparse, quantised, or of a dtype that safetensors lacks. The message names it.
    """
    skeleton, tensors = split_tree(tree)
    json.dumps(skeleton)
    for name, tensor in tensors.items():
        try:
            _require_dense(tensor, name)
            # An empty tensor of the same dtype: it fails for the same dtypes, and costs nothing.
            pack_tensors({name: torch.empty(0, dtype=tensor.dtype)})
        except (ValueError, KeyError, SafetensorError) as error:
            raise TypeError(f"{name} is a {outline(tensor)} tensor: {error}") from error


def join_tree(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuilds a tree that `split_tree` separated.

    Raises:
        ValueError: the skeleton was not made by `split_tree`, or a tensor is missing.
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
        # Different keys can have the same path: 1 and "1".
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


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's name without `torch.`: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def outline(tensor: torch.Tensor | None) -> str:
    """The dtype and shape, for messages: `float32[2, 3]`; `missing` for None."""
    return "missing" if tensor is None else f"{dtype_name(tensor)}{list(tensor.shape)}"


def _require_dense(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"{name} is sparse or quantised: only dense tensors can be kept")


def plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's values in host memory, C-contiguous.

    Raises:
        ValueError: the tensor is sparse or quantised.
    """
    _require_dense(tensor, name)
    # Conjugate and negative views are lazy: their bytes are not yet their values.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
