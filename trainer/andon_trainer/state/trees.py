"""Trees of state as JSON and safetensors, without pickle.

Theory of operation. What `state_dict()` of an optimizer or scheduler returns is a tree of dicts,
lists, tuples, tensors and plain values. `split_tree` separates it into a skeleton for JSON and
named tensors for safetensors; `join_tree` rebuilds it. In the skeleton a list is a JSON list, and
everything that JSON lacks is an object with one key: `{"tensor": name}`, `{"tuple": [...]}`, and
`{"dict": [[key, value], ...]}`, whose keys need not be strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

__all__ = [
    "dtype_name",
    "elements_of",
    "is_dense",
    "join_tree",
    "map_tensors",
    "outline",
    "pack_tensors",
    "packed_parts",
    "plain_tensor",
    "require_keepable",
    "split_tree",
    "unpack_tensors",
]

_ALIGNMENT = 8
"""Of the elements in a file; also the bytes of its header's length."""

_DTYPES = {
    getattr(torch, name): label
    for label, name in (
        ("I64", "int64"),
        ("F64", "float64"),
        ("C64", "complex64"),
        ("F32", "float32"),
        ("I32", "int32"),
        ("BF16", "bfloat16"),
        ("F16", "float16"),
        ("I16", "int16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("I8", "int8"),
        ("U8", "uint8"),
        ("BOOL", "bool"),
    )
}
"""What the format calls a dtype, in the order in which tensors stand in a file: wide ones first, so
that all are aligned."""


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as bytes in the safetensors format.

    Raises:
        ValueError: a tensor is sparse or quantised, or the format lacks its dtype.
    """
    return b"".join(packed_parts(tensors))


def packed_parts(
    tensors: Mapping[str, torch.Tensor], last: Mapping[str, torch.Tensor] | None = None
) -> list[bytes | memoryview]:
    """The parts of a file in the safetensors format: its header, and the elements of each tensor.

    The library would copy a state three times, while all workers wait for a newcomer. These parts
    are views of the tensors, so joining them makes the only copy. The file is the library's, byte
    by byte.

    Args:
        tensors: by name.
        last: tensors whose elements come behind all others.

    Raises:
        ValueError: a tensor is sparse or quantised, or the format lacks its dtype.
    """
    ordered = [*_ordered(tensors), *_ordered(last or {})]
    header, at = {}, 0
    for name, tensor in ordered:
        end = at + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    elements = (_elements_of(tensor) for _, tensor in ordered)
    return [len(text).to_bytes(_ALIGNMENT, "little"), text, *elements]


def elements_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The elements of all tensors as they stand in a file of them, without its header."""
    return b"".join(_elements_of(tensor) for _, tensor in _ordered(tensors))


def _ordered(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Plain tensors in the order of a file: by dtype, then by name."""
    plain = [(name, plain_tensor(tensor, name)) for name, tensor in tensors.items()]
    for name, tensor in plain:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {outline(tensor)}, a dtype that safetensors lacks")
    places = list(_DTYPES)
    return sorted(plain, key=lambda each: (places.index(each[1].dtype), each[0]))


def _elements_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in `data`, in host memory.

    Raises:
        ValueError: `data` is not in the safetensors format.
    """
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"this is not a state in the safetensors format: {error}") from error


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
        except ValueError as error:
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


def map_tensors(tree: Any, each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree of new dicts, lists and tuples, with what `each` returns in place of each tensor.

    What `split_tree` refuses is in it as it was.
    """
    if isinstance(tree, torch.Tensor):
        return each(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(part, each) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [map_tensors(part, each) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return tree


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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is neither sparse nor quantised."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _require_dense(tensor: torch.Tensor, name: str) -> None:
    if not is_dense(tensor):
        raise ValueError(f"{name} is sparse or quantised: only dense tensors can be kept")


def plain_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's values in host memory, C-contiguous.

    Raises:
        ValueError: the tensor is sparse or quantised.
    """
    _require_dense(tensor, name)
    # Conjugate and negative views are lazy: their bytes are not yet their values.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
