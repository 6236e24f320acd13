"""Gathering: what every worker gives, on every worker, between two steps or in a loop body.

Theory of operation. Between two steps a scalar all-reduce carries a few kilobytes of each worker to
all of them. What is larger goes in several: the first says how long each worker's bytes are, so all
workers know how many follow. Each piece begins with its worker's rank. If a worker is lost on the
way, its rank is missing from then on, and what came of it is dropped, on all others alike.

In a loop body the bytes go by the step's own round (`gradients.step_gather`), and tensors stay in
autograd's graph: a gradient reaches this worker's own rows. If each worker goes backward from the
same loss of all rows, the sum over workers is the gradient of one process. The line takes a mean by
samples, so each worker's part is multiplied by all samples and divided by its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from andon.protocol.limits import MAX_GIVEN_BYTES
from andon_trainer.averaging.step_gather import OwnRows
from andon_trainer.place.member import WorkerMember
from andon_trainer.state.trees import (
    join_tree,
    outline,
    pack_tensors,
    split_tree,
    unpack_tensors,
)

__all__ = [
    "MOST_BYTES",
    "concatenate",
    "first_not_finite_row",
    "gather_bytes",
    "own_rows",
    "pack",
    "refuse_size",
    "unpack",
]

MOST_BYTES = 16 * 2**20
"""The most that a worker may give at once: thousands of round trips."""

_RANK = struct.Struct("<I")
_HEAD = struct.Struct("<II")
"""Of the first piece: rank and length."""
_LENGTH = struct.Struct("<I")


def gather_bytes(member: WorkerMember, rank: int, data: bytes) -> dict[int, bytes]:
    """What each worker gave, by rank in rising order; the same on all workers.

    Raises:
        ValueError: there are more than `MOST_BYTES`.
        LineHalted: the line stopped.
    """
    refuse_size(data)
    first = MAX_GIVEN_BYTES - _HEAD.size
    found: dict[int, bytes] = {}
    lengths: dict[int, int] = {}
    given = member.all_gather(_HEAD.pack(rank, len(data)) + data[:first])
    for piece in filter(None, given):  # Another implementation's worker may give nothing.
        whose, lengths[whose] = _HEAD.unpack_from(piece)
        found[whose] = piece[_HEAD.size :]
    size = MAX_GIVEN_BYTES - _RANK.size
    at = first
    while at < max(lengths[each] for each in found):
        pieces = member.all_gather(_RANK.pack(rank) + data[at : at + size])
        came = {_RANK.unpack_from(piece)[0]: piece[_RANK.size :] for piece in pieces if piece}
        found = {each: had + came[each] for each, had in found.items() if each in came}
        at += size
    return {each: found[each] for each in sorted(found)}


def refuse_size(data: bytes) -> None:
    """Raises ValueError for more than `MOST_BYTES`."""
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"this worker gathers {len(data)} bytes, and at most {MOST_BYTES} go from worker to "
            "worker: gather less, such as sums or counts, or write to files"
        )


def framed(parts: Sequence[bytes]) -> bytes:
    """What the processes of one worker give, as one: a worker may be a host with several."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unframed(data: bytes) -> list[bytes]:
    """What `framed` was given."""
    parts, at = [], 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0]
        parts.append(data[start:at])
    return parts


def pack(value: Any) -> bytes:
    """A number, a tensor, or a structure of such, as bytes.

    Raises:
        TypeError: there is something else in it.
        ValueError: a tensor is sparse or quantised.
    """
    skeleton, tensors = split_tree(_as_tensors(value, torch.Tensor.detach))
    text = json.dumps(skeleton).encode()
    return _LENGTH.pack(len(text)) + text + pack_tensors(tensors)


def unpack(data: bytes) -> Any:
    """What `pack` was given, its numbers as tensors of one element."""
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return join_tree(json.loads(data[_LENGTH.size : start]), unpack_tensors(data[start:]))


def concatenate(parts: Sequence[Any], like: Any) -> Any:
    """Structures of tensors, concatenated along their first dimension.

    Args:
        parts: of the workers, by rank.
        like: this worker's, whose devices the results are on.

    Raises:
        ValueError: the workers' structures, dtypes or shapes differ.
    """
    if isinstance(like, Mapping):
        if any(not isinstance(part, Mapping) or part.keys() != like.keys() for part in parts):
            raise ValueError(f"another worker gathers other names than {', '.join(map(str, like))}")
        return {key: concatenate([part[key] for part in parts], like[key]) for key in like}
    if isinstance(like, list | tuple):
        if any(not isinstance(part, list | tuple) or len(part) != len(like) for part in parts):
            raise ValueError(
                "the workers gather lists of different lengths: a list is a structure of values, "
                "so make a tensor of numbers that are to be concatenated, torch.tensor(numbers)"
            )
        columns = [concatenate(list(each), own) for *each, own in zip(*parts, like, strict=True)]
        return tuple(columns) if isinstance(like, tuple) else columns
    device = like.device if isinstance(like, torch.Tensor) else torch.device("cpu")
    return _joined([part.to(device) for part in parts])


def own_rows(value: Any, factor: float | None = None) -> Any:
    """This worker's rows as a part of all workers', in autograd's graph.

    Args:
        value: what the script gathers.
        factor: what their gradient is multiplied by; None: nothing; 0: there are no rows, and a
            graph.
    """

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if factor == 0:
            return tensor[:0]
        if factor is None or not tensor.requires_grad:
            return tensor
        multiplied: torch.Tensor = OwnRows.apply(tensor, factor)  # type: ignore[no-untyped-call]  # torch's own signature
        return multiplied

    return _as_tensors(value, rows)


def first_not_finite_row(value: Any) -> float | None:
    """A number that is not finite, in a tensor that has a graph; None: there is none."""
    _, tensors = split_tree(_as_tensors(value, lambda tensor: tensor))
    for tensor in tensors.values():
        values = tensor.detach() if tensor.requires_grad else tensor[:0]
        bad = values[~torch.isfinite(values)]
        if bad.numel():
            return float(bad[0])
    return None


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    # A worker without samples has an empty tensor, whose dtype and shape nobody chose, unless it
    # has a graph.
    full = [part for part in parts if part.numel()] or parts[:1]
    first = full[0]
    full += [part for part in parts if not part.numel() and part.requires_grad]
    for part in full:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"one worker gathers {outline(first)} and another {outline(part)}: only the first "
                "dimension may differ"
            )
    return torch.cat(full)


def _as_tensors(value: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with what is `made` of its tensors, which have a first dimension."""
    if isinstance(value, Mapping):
        return {key: _as_tensors(part, made) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_as_tensors(part, made) for part in value])
    if isinstance(value, bool | int | float):
        # Exact: int64 and float64 hold whatever Python computed.
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"line.gather takes tensors, numbers, and lists and dicts of them, not "
            f"{type(value).__name__}"
        )
    return made(value.reshape(1) if value.dim() == 0 else value)
