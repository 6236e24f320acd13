"""The digest of a training set, by which workers find out that theirs differ.

Theory of operation. A position means the same sample on every worker only if all have the same
data. A length says little: an unseeded `random_split` gives each worker another subset of the same
size. So the digest covers the indices of every `Subset`, whole, and a few samples as the loader
collates them.

Random augmentation must not look like other data. Each batch is loaded twice, under two seeds that
all workers share. A part of a batch that differs, such as an image beside its label, is left out in
all batches. What is random and alike twice by chance, such as an image that is seldom flipped, is
alike on all workers too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

__all__ = ["data_digest", "datasets_in"]

_Leaf = tuple[str, bytes]
"""A path into a batch, and what lies there."""

_MOST_BYTES = 2**20
"""Of one tensor no more than this is looked at: a batch of volumes may be huge."""


def data_digest(dataset: Any, draw: Callable[[int], Iterable[Any]]) -> str:
    """SHA-256 of what a training set is, hexadecimal.

    Args:
        dataset: map-style; the indices of its subsets are part of the digest.
        draw: loads the same few batches at each call, with other random numbers for each argument.
            It is called with 0 and 1.
    """
    digest = hashlib.sha256(f"andon data 1, {len(dataset)} samples".encode())
    for part in datasets_in(dataset):
        if isinstance(part, Subset):
            digest.update(b"subset" + _index_bytes(part.indices))
    first, second = _drawn(draw(0)), _drawn(draw(1))
    unstable = {
        path
        for path, number in first.keys() | second.keys()
        if first.get((path, number)) != second.get((path, number))
    }
    for (path, number), content in sorted(first.items()):
        if path not in unstable:
            digest.update(f"{number}{path}".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def datasets_in(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it wraps, outermost first."""
    yield dataset
    if isinstance(dataset, ConcatDataset):
        inner = list(dataset.datasets)
    else:  # as Subset names it; not by getattr, which some datasets answer for any name
        within = getattr(dataset, "__dict__", {}).get("dataset")
        inner = [] if within is None else [within]
    for each in inner:
        yield from datasets_in(each)


def _index_bytes(indices: Any) -> bytes:
    found = np.asarray(indices)
    if found.dtype == object:
        return "\n".join(map(str, indices)).encode()
    return f"{found.dtype.str} {found.shape}".encode() + found.tobytes()


def _drawn(batches: Iterable[Any]) -> dict[tuple[str, int], bytes]:
    return {
        (path, number): content
        for number, batch in enumerate(batches)
        for path, content in _leaves(batch, "")
    }


def _leaves(value: Any, path: str) -> Iterator[_Leaf]:
    """What a batch holds: tensors, arrays and plain values, wherever they lie in it."""
    if isinstance(value, torch.Tensor):
        yield path, _tensor_bytes(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        flat = value.reshape(-1)[: _MOST_BYTES // value.itemsize]
        yield path, f"{value.dtype.str} {value.shape}".encode() + flat.tobytes()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | np.ndarray):
        for place, part in enumerate(value):
            yield from _leaves(part, f"{path}[{place}]")
    elif isinstance(value, str | bytes | int | float | complex | bool | np.generic | None):
        yield path, repr(value).encode()
    elif callable(getattr(value, "tobytes", None)):
        yield path, bytes(value.tobytes()[:_MOST_BYTES])  # an image
    else:
        yield path, type(value).__qualname__.encode()  # a repr may have an address in it


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    outline = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return outline
    most = max(1, _MOST_BYTES // tensor.element_size())
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)[:most].cpu().contiguous()
    return outline + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
