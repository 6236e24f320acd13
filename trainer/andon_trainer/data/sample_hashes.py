"""Hashes of what a loop body is given, one a sample: so that workers can see whose data differ.

Theory of operation. A batch is whatever the script's collate function made. A tensor whose first
dimension is the number of samples has a row for each, and so has a list of as many texts or
numbers. Everything else (a scale, a tensor of another shape) belongs to all samples, and is a part
of each hash. If nothing in the batch has rows, there is one hash for all.

Hashes are compared between workers of one script only. They depend on values, and neither on
addresses nor on the order of a set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from andon.protocol.attestations import SAMPLE_BYTES

try:
    import xxhash
except ImportError:  # Then this worker does not say that it verifies; see `can_attest`.
    if not TYPE_CHECKING:
        xxhash = None

__all__ = ["sample_hashes"]

_DEEPEST = 32
"""Beyond it only types count: an object may contain itself."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def sample_hashes(batch: Any, samples: int, positions: int, *, divided: bool = True) -> bytes:
    """XXH3-64 of each sample of a batch, or one hash for all if it can't be divided.

    Args:
        batch: what the loop body gets, in host memory or on a device.
        samples: how many there are in it.
        positions: those of the grain, at least `samples`; one without a sample has the hash of no
            bytes.
        divided: False: one hash for all is wanted, that of the others.

    Returns:
        `SAMPLE_BYTES` for each position, or once.
    """
    found = _hashes(batch, samples, positions)
    return found if divided or len(found) == SAMPLE_BYTES else xxhash.xxh3_64_digest(found)


def _hashes(batch: Any, samples: int, positions: int) -> bytes:
    common, rows = xxhash.xxh3_64(), [xxhash.xxh3_64() for _ in range(samples)]
    divided = False
    for head, value in _leaves("", batch, samples, 0):
        each = _rows_of(value, samples)
        if each is None:
            common.update(head)
            common.update(_bytes_of(value))
            continue
        divided = True
        for row, data in zip(rows, each, strict=True):
            row.update(head)
            row.update(data)
    if not divided and samples:
        return common.digest()
    shared = common.digest()
    for row in rows:
        row.update(shared)
    empty = xxhash.xxh3_64_digest(b"")
    found = b"".join(row.digest() for row in rows) + empty * (positions - samples)
    assert len(found) == SAMPLE_BYTES * positions
    return found


def _leaves(path: str, value: Any, samples: int, depth: int) -> Iterator[tuple[bytes, Any]]:
    """The tensors, arrays and plain values in a batch, each behind where it is and what it is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        row = tuple(value.shape[1:])
        yield f"{path}:{value.dtype}{row}:".encode(), value
    elif isinstance(value, _PLAIN) or _is_column(value, samples):
        yield f"{path}:{type(value).__name__}:".encode(), value
    elif depth >= _DEEPEST:
        yield f"{path}:{type(value).__qualname__}".encode(), b""
    else:
        parts = list(_parts_of(value))
        yield f"{path}:{type(value).__qualname__}[{len(parts)}]".encode(), b""
        for name, part in parts:
            yield from _leaves(f"{path}.{name}", part, samples, depth + 1)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object contains, in an order that depends on values alone."""
    if isinstance(value, Mapping):
        yield from sorted(((repr(key), part) for key, part in value.items()), key=_first)
    elif isinstance(value, Set):
        yield from ((each, None) for each in sorted(map(repr, value)))
    elif isinstance(value, Sequence):
        yield from ((str(at), part) for at, part in enumerate(value))
    elif isinstance(value, np.generic):
        yield "", np.asarray(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))
    else:
        yield from sorted(getattr(value, "__dict__", {}).items())


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _is_column(value: Any, samples: int) -> bool:
    """Whether a list has a plain value for each sample, as collate functions leave texts."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return len(value) == samples and all(isinstance(each, _PLAIN) for each in value)


def _rows_of(value: Any, samples: int) -> Iterator[bytes] | None:
    """The bytes of each sample; None: the value has no rows."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if not value.ndim or len(value) != samples or _is_sparse(value):
            return None
        return (_bytes_of(row) for row in _dense(value))
    return (_bytes_of(each) for each in value) if _is_column(value, samples) else None


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _dense(value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    """The value in host memory, contiguous, so that rows are views."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return np.ascontiguousarray(value)


def _bytes_of(value: Any) -> Any:
    """The bytes that stand for a tensor, an array or a plain value."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _bytes_of_tensor(value)
    if isinstance(value, np.ndarray):
        plain = value.dtype.hasobject
        return repr(value.tolist()).encode() if plain else np.ascontiguousarray(value).tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return repr(list(value)).encode()
    return repr(value).encode("utf-8", "surrogatepass")


def _bytes_of_tensor(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.is_sparse:
        whole = tensor.coalesce()
        return b"".join(bytes(_bytes_of_tensor(each)) for each in (whole.indices(), whole.values()))
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    elif _is_sparse(tensor):
        tensor = tensor.to_dense()
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""
