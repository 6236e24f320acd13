"""Coupled samples: a loss in which the samples of a batch meet each other, seen by its graph.

Theory of operation. InfoNCE, in-batch negatives and triplets compare each sample with all others of
the batch. A worker has only its own rows, so its loss is another function than that of the whole
batch, whose gradient no mean over workers gives. Near such a loss there is a product, or a
difference, of the batch with itself: as many rows as columns, and as many as there are samples.

A product with a weight matrix may look the same if the model has as many classes as the batch has
samples. So both sides must depend on the batch. If one side has no graph (features of a frozen
encoder), its size tells: it follows the batch, where a weight's does not.

A script that has gathered all workers' rows may still compare its own with them. Then one side of a
product comes from the gather, and the other one does not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from andon_trainer.averaging.step_gather import OwnRows

__all__ = ["CoupledSamples"]

log = logging.getLogger(__name__)

_LOSSES_CHECKED = 100
"""Later losses are computed like these."""
_MOST_NODES = 128
"""From the loss on: what couples samples is near it."""
_MOST_BELOW = 24
"""A function of parameters alone has fewer nodes."""
_MOST_IN_MODEL = 10_000
"""Nodes of a model that are searched for a gather."""
_PRODUCTS = frozenset({"MmBackward0", "BmmBackward0", "CdistBackward0", "EuclideanDistBackward0"})
_PAIRWISE = frozenset({"SubBackward0", "MulBackward0", "AddBackward0", "RsubBackward1"})
"""They meet by broadcasting, as in `z[:, None] - z[None]`."""
_LAYERS = frozenset(
    {"AddmmBackward0", "BaddbmmBackward0", "BmmBackward0", "ConvolutionBackward0", "MmBackward0"}
)
"""Data, which has no graph, enters at one of these."""
_LOOKUPS = frozenset(
    {"EmbeddingBackward0", "EmbeddingBagBackward0", "GatherBackward0", "IndexBackward0"}
    | {"IndexSelectBackward0"}
)
"""The rows of a parameter that a batch names."""


class CoupledSamples:
    """Warns, once, of a loss that couples samples which lie on several workers."""

    def __init__(self) -> None:
        """Has seen no loss."""
        self._left = _LOSSES_CHECKED
        self._sizes: dict[int, set[int]] = {}
        """Of products with what has no graph: by columns a sample, the numbers of samples."""

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Looks at a loss of this worker's samples, which are not the whole batch."""
        if self._left <= 0 or samples < 2:
            return
        self._left -= 1
        for node in _near(loss):
            sides = _sides(node, samples)
            if sides is None:
                continue
            known = [_depends_on_batch(side) for side in sides if side is not None]
            if all(known) and (len(known) == 2 or self._follows_batch(node, samples)):
                self._warn(samples)
                return

    def look_at_gathered(self, loss: torch.Tensor) -> None:
        """Looks at a loss in a step in which the script has gathered."""
        if self._left <= 0:
            return
        self._left -= 1
        for node in _near(loss):
            sides = [each for each, _ in node.next_functions]
            if type(node).__name__ not in _PRODUCTS or len(sides) != 2 or None in sides:
                continue
            gathered = [_is_gathered(side) for side in sides]
            own = sides[gathered[0]]
            if gathered[0] != gathered[1] and _depends_on_batch(own):
                self._left = 0
                log.warning(
                    "the loss compares this worker's own rows with those that line.gather "
                    "returned: what the other workers' rows send back to these is missing from "
                    "the gradient. Take both sides from what line.gather returned; see "
                    "docs/guide/coupled-losses.md"
                )
                return

    def _follows_batch(self, node: Any, samples: int) -> bool:
        """Whether a product had as many columns a sample for another number of samples."""
        sizes = self._sizes.setdefault(_shape(node)[-1] // samples, set())
        sizes.add(samples)
        return len(sizes) > 1

    def _warn(self, samples: int) -> None:
        self._left = 0
        log.warning(
            "the loss compares the samples of a batch with each other, and this worker compares "
            "only its own %d: the line trains for another loss than one process with the whole "
            "batch. Gather what is compared, z = line.gather(z), and compute the loss of all "
            "samples on it; see docs/guide/coupled-losses.md",
            samples,
        )


def _near(loss: torch.Tensor) -> Iterator[Any]:
    """The nodes of a loss's graph, those near the loss first."""
    waiting, seen = deque([loss.grad_fn]), set[int]()
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting += [each for each, _ in node.next_functions]


def _sides(node: Any, samples: int) -> list[Any] | None:
    """The two sides of a node in which samples may meet each other; None: it is no such node."""
    name, sides = type(node).__name__, [each for each, _ in node.next_functions]
    if name == "PdistBackward0":
        rows = _shape(sides[0])[:1]
        return sides * 2 if rows in ((samples,), (2 * samples,)) else None
    if len(sides) != 2:
        return None
    shape = _shape(node)
    if name == "BmmBackward0" and shape[:1] != (1,):
        return None  # Products within each sample, as in attention.
    meeting = shape[-2:] if name in _PRODUCTS else shape[:2]
    # Two views of each sample are one batch, often.
    square = meeting in ((samples, samples), (2 * samples, 2 * samples))
    if name in _PAIRWISE:
        one, other = (_stretched(each) for each in sides)
        return sides if square and {one, other} == {0, 1} else None
    if name not in _PRODUCTS:
        return None
    # Or they meet in the sum over them, as in a covariance.
    summed = name == "MmBackward0" and node._saved_self_sym_sizes[-1:] == (samples,)
    if square or (summed and None not in sides):
        return sides
    return None


def _stretched(node: Any) -> int | None:
    """Which of its first two dimensions broadcasting stretches; None: neither."""
    for _ in range(3):  # Below an expand, a view or a division.
        shape = _shape(node)
        if node is None or len(shape) < 2:
            return None
        if (shape[0] == 1) != (shape[1] == 1):
            return 0 if shape[0] == 1 else 1
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _shape(node: Any) -> tuple[int, ...]:
    """Of a node's first output; empty: not known."""
    outputs = getattr(node, "_input_metadata", ())
    return tuple(outputs[0].shape) if outputs else ()


def _is_gathered(node: Any) -> bool:
    """Whether rows that were gathered, with a gradient, went into what a node made."""
    waiting, seen = [node], set[int]()
    while waiting and len(seen) < _MOST_IN_MODEL:
        here = waiting.pop()
        if here is None or id(here) in seen:
            continue
        seen.add(id(here))
        if type(here).__name__ == OwnRows.__name__ + "Backward":
            return True
        waiting += [each for each, _ in here.next_functions]
    return False


def _depends_on_batch(node: Any) -> bool:
    """Whether a batch went into what a node made: it is no function of parameters alone."""
    waiting = [node]
    for _ in range(_MOST_BELOW):
        if not waiting:
            return False
        here = waiting.pop()
        name, edges = type(here).__name__, [each for each, _ in here.next_functions]
        if name == "AccumulateGrad":
            if not isinstance(here.variable, nn.Parameter):
                return True  # An input whose gradient the script wants.
            continue
        entered = name in _LAYERS and None in edges
        if entered or name in _LOOKUPS or isinstance(here, BackwardCFunction):
            return True
        waiting += [each for each in edges if each is not None]
    return True
