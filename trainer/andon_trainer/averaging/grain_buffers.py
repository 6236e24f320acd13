"""Buffers on a line of grains: each grain starts from the same, and statistics follow the tree.

Theory of operation. A grain's forward must not see what another grain's has left: so before each
grain the running statistics are the head's again. What a grain makes of them, the *values*, is one
more vector of the grain, added along the tree with the grain's weight. The commit sets the mean. A
last number for each buffer says whether the grain has changed it: one that no grain has changed
stays as it is, bit for bit, as in a layer in eval mode. A counter that was changed is the head's
plus 1: the step was one, however many grains it had.

Other buffers must not change in a forward: nobody knows how to add them up. A script whose forward
changes one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from andon.protocol.grains import Grains, Node, fold, leaf_factor
from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.block_numbers import BlockNumbers, rooms_for
from andon_trainer.averaging.copied_buffers import script_buffers
from andon_trainer.averaging.node_sums import NodeSums, divided, leaves_of
from andon_trainer.core.calls import Call, Floats, NodePart
from andon_trainer.model.wrappers import named_modules

__all__ = ["GrainBuffers", "LineGrainBuffers"]

_NAME = "running statistics"


class GrainBuffers:
    """The buffers of some modules, one grain after another. Used by one thread."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Finds the layers."""
        layers = [
            layer
            for module in modules
            for _, layer in named_modules(module)
            if isinstance(layer, _NormBase)
        ]
        self._layers = list({id(layer): layer for layer in layers}.values())
        self._others = script_buffers(modules)
        self._others_before: dict[str, torch.Tensor] = {}
        self._start: list[torch.Tensor] = []
        """The head's values."""
        self._grains: Grains | None = None
        self._sums = NodeSums(1)
        self._weights: dict[Node, float] = {}
        self._open = False
        """Whether an attempt was begun that is neither committed nor put away."""

    def begin(self, grains: Grains) -> None:
        """A step's first attempt begins, or one of which nothing is kept."""
        self._start = [buffer.clone() for buffer in self._buffers()]
        self._others.watch()
        self._others_before = self._others.read()
        self._grains, self._sums, self._weights = grains, NodeSums(grains.count), {}
        self._open = True

    def begin_again(self) -> None:
        """An attempt begins that goes on from the sums of the one before."""
        self._others.watch()
        self._open = True

    def next_grain(self) -> None:
        """A grain's forward follows: the head's values are back."""
        self._write(self._start)

    def take(self, grain: int, weight: float) -> None:
        """A grain's backward is over: takes what it has made of the statistics."""
        assert self._grains is not None
        self._weights[Node(grain, grain + 1)] = weight
        factor = float(leaf_factor(weight, self._grains.micro_batch, self._grains.count))
        vector = self._vector() if weight else None
        self._sums.add(grain, leaves_of([vector], factor))

    @property
    def sums(self) -> NodeSums:
        """The sums of what this process's grains have made of the statistics, one vector each."""
        return self._sums

    @property
    def elements(self) -> int:
        """Length of such a vector: the statistics, and a flag for each buffer."""
        sizes = [each.numel() for each in self._start if each.is_floating_point()]
        return sum(sizes) + len(self._start)

    @property
    def device(self) -> torch.device:
        """Where such a vector is."""
        return self._start[0].device if self._start else torch.device("cpu")

    def check(self) -> None:
        """Raises RuntimeError if a forward has changed a buffer that nobody can add up."""
        self._others.check()
        if changed := self._others.changed(self._others_before):
            raise RuntimeError(
                f"the loop body changes the buffer {changed[0]}, which is no running statistic: "
                "with same_bits its value would depend on which worker computed what. Change it "
                "under `if line.committed:` from what is the same on all workers, or leave "
                "same_bits out"
            )

    def put_away(self) -> None:
        """The worker waits between two attempts: the models get the head's values."""
        if self._open:
            self._write(self._start)
        self._open = False

    def committed(self) -> None:
        """The step is committed, and this worker's were all grains: sets their mean."""
        grains = self._grains
        assert grains is not None
        total = fold(self._weights, grains.root, lambda left, right: left + right)
        (root,) = self._sums[grains.root]
        self._end(None if root is None else divided(root, total, grains.micro_batch, grains.count))

    def _end(self, mean: torch.Tensor | None) -> None:
        """Sets a mean, or the head's values if there is none: the weights of all grains were 0."""
        values = self._start
        if mean is not None and self._start:
            sizes = [each.numel() for each in self._start if each.is_floating_point()]
            *parts, flags = torch.split(mean, [*sizes, len(self._start)])
            means = iter(parts)
            values = [
                torch.where(
                    flag.to(start.device) > 0,
                    next(means).view_as(start).to(start)
                    if start.is_floating_point()
                    else start + 1,
                    start,
                )
                for start, flag in zip(self._start, flags, strict=True)
            ]
        self._write(values)
        self._sums, self._weights, self._open = NodeSums(1), {}, False

    def __bool__(self) -> bool:
        """Whether there are statistics."""
        return bool(self._buffers())

    def _buffers(self) -> list[torch.Tensor]:
        # Looked up each time: a forward may put another tensor in a buffer's place.
        return [
            buffer.detach()
            for layer in self._layers
            for buffer in layer._buffers.values()
            if buffer is not None
        ]

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers(), values, strict=True):
                buffer.copy_(value)

    def _vector(self) -> torch.Tensor | None:
        """The statistics of now, float32, and for each buffer whether it was changed."""
        now = self._buffers()
        if not now:
            return None
        at = now[0].device
        # One that is not finite, after an overflow of half precision, leaves its buffer as it was.
        values = [
            torch.where(torch.isfinite(new), new, old).to(at, torch.float32).reshape(-1)
            for new, old in zip(now, self._start, strict=True)
            if new.is_floating_point()
        ]
        flags = [(new != old).any().to(at) for new, old in zip(now, self._start, strict=True)]
        return torch.cat([*values, torch.stack(flags).float()])


class LineGrainBuffers(GrainBuffers):
    """The same on a line, whose other workers have the other grains."""

    def __init__(self, averaging: Averaging, modules: Sequence[nn.Module]) -> None:
        """Finds the layers."""
        super().__init__(modules)
        self._averaging = averaging
        self._numbers = BlockNumbers(averaging)
        self._mean: Floats | None = None
        self._total_weight = 0.0

    @property
    def follow(self) -> bool:
        """Whether the present round has an exchange of them."""
        return bool(self)

    def exchange(self, nodes: tuple[NodePart, ...], total_weight: float) -> bool:
        """Makes the round's last exchanges; False if the round is void.

        Args:
            nodes: this worker's, as it gave its gradients.
            total_weight: that of the gradients' averages.
        """
        self.drop()
        mean = np.empty(self.elements, np.float32)
        mine = [self._sum(part.node.node, mean.size) for part in nodes]
        sizes = self._numbers.sizes
        rooms = list(rooms_for(sizes, mean.size))
        ends = accumulate((sum(sizes[room.start : room.stop]) for room in rooms), initial=0)
        for number, (room, start) in enumerate(zip(rooms, ends, strict=False)):
            call = Call(name=_NAME, blocks=room, exact=True)
            parts, last = [each[start:] for each in mine], number == len(rooms) - 1
            if not self._numbers.share_nodes(call, nodes, parts, mean[start:], last=last):
                return False
        # Only now that all parts are here: a void round must leave none.
        self._mean, self._total_weight = mean, total_weight
        return True

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""
        self._mean = None

    def committed(self) -> None:
        """The step is committed: sets what came with it."""
        mean, self._mean = self._mean, None
        there = mean is not None and self._total_weight > 0
        self._end(torch.from_numpy(mean) if there else None)

    def _sum(self, node: Node, size: int) -> Floats:
        (part,) = self._sums[node]
        if part is None:
            return np.full(size, -0.0, np.float32)
        found: Floats = part.cpu().numpy()
        return found
