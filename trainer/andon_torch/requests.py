"""What a collective gives and takes, made of PyTorch's arguments.

Each function checks the arguments of one collective, and raises before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from andon.protocol.peer_calls import CallKind
from andon_torch.tensors import Staging
from andon_trainer.core.peer_work import Part

__all__ = [
    "Request",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "listed",
    "nested",
    "only",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "root_of",
    "scatter",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call, before its memory is known."""

    kind: CallKind
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    shape: Callable[[Staging], tuple[Part, ...]]
    """Its parts, in the memory of the tensors or staged."""
    count: int = 0
    """As `Call.count`."""
    root: int | None = None
    tensors: int = 1
    """How many tensors it has: more than one if it is coalesced."""

    def __post_init__(self) -> None:
        """Refuses tensors of different types in one call."""
        types = sorted({str(one.dtype).removeprefix("torch.") for one in self.all})
        if len(types) > 1:
            raise ValueError(
                f"{self.kind.label}: tensors of different types in one call: {', '.join(types)}"
            )

    @property
    def all(self) -> list[Tensor]:
        """All tensors that are read or written."""
        return [*self.inputs, *self.results]


def listed(tensors: Any) -> list[Tensor]:
    """Tensors as a list; PyTorch takes a single one, too."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Tensor]]:
    """Lists of tensors; PyTorch takes a single list, too."""
    if len(tensors) and isinstance(tensors[0], Tensor):
        return [list(tensors)]
    return [list(each) for each in tensors]


def only(tensors: Any) -> Tensor:
    """The only tensor of a call that takes one.

    Raises:
        ValueError: there are several, or none.
    """
    found = listed(tensors)
    if len(found) != 1:
        raise ValueError(f"this call takes one tensor, and got {len(found)}")
    return found[0]


def root_of(opts: Any) -> int:
    """The root's rank in the group, of options or as a number."""
    return int(getattr(opts, "rootRank", opts or 0))


def all_reduce(tensors: list[Tensor]) -> Request:
    """Of tensors that are input and output."""
    return Request(
        kind=CallKind.ALL_REDUCE,
        inputs=tensors,
        results=tensors,
        count=_elements(tensors),
        tensors=len(tensors),
        shape=lambda staging: tuple(_changing(staging, each) for each in tensors),
    )


def reduce(tensor: Tensor, root: int, *, is_root: bool) -> Request:
    """Of a tensor that at the root becomes the result."""
    return Request(
        kind=CallKind.REDUCE,
        inputs=[tensor],
        results=[tensor],
        count=tensor.numel(),
        root=root,
        shape=lambda staging: (
            _changing(staging, tensor) if is_root else Part((staging.gives(tensor),)),
        ),
    )


def reduce_scatter(output: Tensor, inputs: list[Tensor], ranks: int, rank: int) -> Request:
    """Of one input for each rank; they may differ in length."""
    _check_list(inputs, ranks, "reduce_scatter", "input")
    if inputs[rank].numel() != output.numel():
        raise ValueError(
            f"reduce_scatter: the output has {output.numel()} elements, and this rank's input "
            f"{inputs[rank].numel()}"
        )
    even = all(each.numel() == output.numel() for each in inputs)
    return Request(
        kind=CallKind.REDUCE_SCATTER,
        inputs=inputs,
        results=[output],
        count=output.numel() if even else 0,
        shape=lambda staging: (Part(_given(staging, inputs), (staging.takes(output),)),),
    )


def reduce_scatter_single(outputs: list[Tensor], inputs: list[Tensor], ranks: int) -> Request:
    """Of tensors that hold the inputs for all ranks in order."""
    pairs = list(zip(outputs, inputs, strict=True))
    for output, each in pairs:
        _check_shares(output, each, ranks, "reduce_scatter")
    return Request(
        kind=CallKind.REDUCE_SCATTER,
        inputs=inputs,
        results=outputs,
        count=_elements(outputs),
        tensors=len(outputs),
        shape=lambda staging: tuple(
            Part(_shares(staging.gives(each), ranks), (staging.takes(output),))
            for output, each in pairs
        ),
    )


def broadcast(tensors: list[Tensor], root: int, *, is_root: bool) -> Request:
    """Of tensors that at the root are inputs, and elsewhere outputs."""
    return Request(
        kind=CallKind.BROADCAST,
        inputs=[],
        results=tensors,
        count=_elements(tensors),
        root=root,
        tensors=len(tensors),
        shape=lambda staging: tuple(
            Part((staging.gives(each),)) if is_root else Part((), (staging.takes(each),))
            for each in tensors
        ),
    )


def all_gather(outputs: list[list[Tensor]], inputs: list[Tensor], ranks: int) -> Request:
    """Of inputs, with one output for each rank."""
    pairs = list(zip(outputs, inputs, strict=True))
    for output, each in pairs:
        _check_list(output, ranks, "all_gather", "output")
        _check_sizes(output, each, "all_gather")
    return Request(
        kind=CallKind.ALL_GATHER,
        inputs=inputs,
        results=[each for output in outputs for each in output],
        count=_elements(inputs),
        tensors=len(inputs),
        shape=lambda staging: tuple(
            Part((staging.gives(each),), _taken(staging, output)) for output, each in pairs
        ),
    )


def all_gather_single(outputs: list[Tensor], inputs: list[Tensor], ranks: int) -> Request:
    """Of inputs, with outputs that hold those of all ranks in order."""
    pairs = list(zip(outputs, inputs, strict=True))
    for output, each in pairs:
        _check_shares(each, output, ranks, "all_gather")
    return Request(
        kind=CallKind.ALL_GATHER,
        inputs=inputs,
        results=outputs,
        count=_elements(inputs),
        tensors=len(inputs),
        shape=lambda staging: tuple(
            Part((staging.gives(each),), _shares(staging.takes(output), ranks))
            for output, each in pairs
        ),
    )


def gather(
    outputs: list[Tensor], given: Tensor, root: int, ranks: int, *, is_root: bool
) -> Request:
    """Of an input, with one output for each rank at the root."""
    if is_root:
        _check_list(outputs, ranks, "gather", "output")
        _check_sizes(outputs, given, "gather")
    elif outputs:
        raise ValueError("gather: only the root has outputs")
    return Request(
        kind=CallKind.GATHER,
        inputs=[given],
        results=outputs,
        count=given.numel(),
        root=root,
        shape=lambda staging: (Part((staging.gives(given),), _taken(staging, outputs)),),
    )


def scatter(
    output: Tensor, inputs: list[Tensor], root: int, ranks: int, *, is_root: bool
) -> Request:
    """Of an output, with one input for each rank at the root."""
    if is_root:
        _check_list(inputs, ranks, "scatter", "input")
        _check_sizes(inputs, output, "scatter")
    elif inputs:
        raise ValueError("scatter: only the root has inputs")
    return Request(
        kind=CallKind.SCATTER,
        inputs=inputs,
        results=[output],
        count=output.numel(),
        root=root,
        shape=lambda staging: (Part(_given(staging, inputs), (staging.takes(output),)),),
    )


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], ranks: int) -> Request:
    """Of one input and one output for each rank; they may differ in length."""
    _check_list(outputs, ranks, "all_to_all", "output")
    _check_list(inputs, ranks, "all_to_all", "input")
    return Request(
        kind=CallKind.ALL_TO_ALL,
        inputs=inputs,
        results=outputs,
        shape=lambda staging: (Part(_given(staging, inputs), _taken(staging, outputs)),),
    )


def all_to_all_single(
    output: Tensor,
    given: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    ranks: int,
) -> Request:
    """Of tensors that are divided along their first dimension, equally if nothing else is said."""
    taken_rows = _splits(output, output_splits, ranks, "output")
    given_rows = _splits(given, input_splits, ranks, "input")
    return Request(
        kind=CallKind.ALL_TO_ALL,
        inputs=[given],
        results=[output],
        shape=lambda staging: (
            Part(
                _cut_at(staging.gives(given), given_rows),
                _cut_at(staging.takes(output), taken_rows),
            ),
        ),
    )


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _changing(staging: Staging, tensor: Tensor) -> Part:
    view = staging.changes(tensor)
    return Part((view,), (view,))


def _given(staging: Staging, tensors: Sequence[Tensor]) -> tuple[memoryview, ...]:
    return tuple(staging.gives(each) for each in tensors)


def _taken(staging: Staging, tensors: Sequence[Tensor]) -> tuple[memoryview, ...]:
    return tuple(staging.takes(each) for each in tensors)


def _shares(view: memoryview, ranks: int) -> tuple[memoryview, ...]:
    """The ranks' equal shares of one tensor's bytes."""
    size = len(view) // ranks
    return tuple(view[i * size : (i + 1) * size] for i in range(ranks))


def _cut_at(view: memoryview, rows: Sequence[int]) -> tuple[memoryview, ...]:
    """The bytes of so many rows each, one after the other."""
    total = sum(rows)
    unit = len(view) // total if total else 0
    found, start = [], 0
    for each in rows:
        found.append(view[start : start + each * unit])
        start += each * unit
    return tuple(found)


def _splits(tensor: Tensor, sizes: Sequence[int], ranks: int, what: str) -> list[int]:
    """How many rows of a tensor each rank gives or gets."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % ranks:
            raise ValueError(
                f"all_to_all_single: the {what}'s {rows} rows can't be divided by {ranks} ranks"
            )
        return [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: the {what}'s splits {list(sizes)} are not its {rows} rows on "
            f"{ranks} ranks"
        )
    return list(sizes)


def _check_list(tensors: Sequence[Any], ranks: int, call: str, what: str) -> None:
    if len(tensors) != ranks:
        raise ValueError(
            f"{call}: {len(tensors)} {what} tensors for {ranks} ranks: there must be one for each"
        )


def _check_sizes(several: Sequence[Tensor], one: Tensor, call: str) -> None:
    for rank, each in enumerate(several):
        if each.numel() != one.numel():
            raise ValueError(
                f"{call}: rank {rank}'s tensor has {each.numel()} elements, and this rank's "
                f"{one.numel()}: all must have the same"
            )


def _check_shares(share: Tensor, whole: Tensor, ranks: int, call: str) -> None:
    if share.numel() * ranks != whole.numel():
        raise ValueError(f"{call}: {whole.numel()} elements are not {ranks} times {share.numel()}")
