"""The digest of a training set, by which workers find out that their data differs.

Theory of operation. A position means the same sample on every worker only if all have the same
data. Comparing lengths is not enough: an unseeded `random_split` gives each worker another subset
of the same size. So the digest covers all indices of every `Subset`, and a few samples as the
loader collates them.

Random augmentation must not look like different data. So each batch is loaded twice, under two
seeds that all workers share, and a part of a batch that differs between the two, such as the image
beside its label, is left out in all batches. A random part that happens to be equal twice, such as
an image that is seldom flipped, is equal on all workers too: they use the same seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

__all__ = ["data_digest", "leaves_of", "nested_datasets"]

_Leaf = tuple[str, bytes]
"""A path into a batch, and the value there as bytes."""

_MOST_BYTES = 2**20
"""The most bytes that are hashed of one tensor: a batch of volumes may be huge."""


def data_digest(dataset: Any, order: bytes, size: int, draw: Callable[[int], Iterable[Any]]) -> str:
    """SHA-256 of a training set's content, hexadecimal.

    Args:
        dataset: map-style; the indices of its subsets are part of the digest.
        order: a digest of the first epoch's order; empty if the run's plan says it.
        size: number of positions in an epoch.
        draw: loads the same few batches at each call, with random numbers seeded by its argument.
            It is called with 0 and 1.
    """
    digest = hashlib.sha256(f"andon data 1, {size} samples".encode())
    if order:
        digest.update(b"order" + order)
    for part in nested_datasets(dataset):
        if isinstance(part, Subset):
            digest.update(b"subset" + _index_bytes(part.indices))
    first, second = leaves_of(draw(0)), leaves_of(draw(1))
    # By path over all batches, not leaf by leaf: an image that is flipped with probability 1/2 is
    # equal twice in some batches.
    unstable = {
        path
        for path, number in first.keys() | second.keys()
        if first.get((path, number)) != second.get((path, number))
    }
    for (path, number), content in sorted(first.items()):
        if path not in unstable:
            digest.update(f"{number}{path}".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it wraps, outermost first."""
    yield dataset
    if isinstance(dataset, ConcatDataset):
        inner = list(dataset.datasets)
    else:
        # `dataset` is what Subset calls it. Not by getattr: some datasets answer to any name.
        within = getattr(dataset, "__dict__", {}).get("dataset")
        inner = [] if within is None else [within]
    for each in inner:
        yield from nested_datasets(each)


def _index_bytes(indices: Any) -> bytes:
    found = np.asarray(indices)
    if found.dtype == object:
        return "\n".join(map(str, indices)).encode()
    return f"{found.dtype.str} {found.shape}".encode() + found.tobytes()


def leaves_of(batches: Iterable[Any]) -> dict[tuple[str, int], bytes]:
    """The leaves of all batches, by path and number of the batch."""
    return {
        (path, number): content
        for number, batch in enumerate(batches)
        for path, content in _leaves(batch, "")
    }


def _leaves(value: Any, path: str) -> Iterator[_Leaf]:
    """Tensors, arrays and plain values of a batch, however they are nested."""
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
        yield path, bytes(value.tobytes()[:_MOST_BYTES])  # A PIL image.
    else:
        # Only the type: a repr may contain an address, which differs between processes.
        yield path, type(value).__qualname__.encode()


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    outline = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return outline
    most = max(1, _MOST_BYTES // tensor.element_size())
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)[:most].cpu().contiguous()
    return outline + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
