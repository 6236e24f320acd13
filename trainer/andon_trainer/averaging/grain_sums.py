"""All of a worker's sums of grains, and how they reach the host while the last backward runs.

Theory of operation. Every grain but a share's last is taken when its backward is over. The last one
is taken block by block, as its backward completes them: then all sums of a block are whole, and are
staged, one contribution a node, while backward goes on. `NodeStaging` is that, in the place of a
staging that stages `p.grad`. What is staged are copies. The sums themselves stay until the step is
committed: if its round is void, they are sent again, and more grains are added to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from andon.protocol.grains import Grains, Node, leaf_factor
from andon_trainer.averaging.attesting import SumHashes
from andon_trainer.averaging.node_sums import NodeSums, Parts, leaves_of
from andon_trainer.averaging.staging import Factor, Staging
from andon_trainer.core.calls import Floats
from andon_trainer.model.layout import ModelPlan

__all__ = ["GrainSums", "NodeStaging"]


class GrainSums:
    """The sums of a step's grains, of all blocks. Used by one thread at a time."""

    def __init__(self, plan: ModelPlan) -> None:
        """Of no step yet."""
        self._plan = plan
        self._grains: Grains | None = None
        self._blocks: list[NodeSums] = []
        self._nodes_hashed = False
        self.hashes: SumHashes | None = None
        """What the grains were hashed to; None: nobody wants to know."""

    def begin(self, grains: Grains, *, attests: bool = False) -> None:
        """A step's first attempt begins, or one of which nothing is kept.

        `attests`: whether grains are hashed as they are taken.
        """
        self._grains = grains
        self.hashes = SumHashes(self._plan) if attests else None
        self._nodes_hashed = False
        self._blocks = [NodeSums(grains.count) for _ in self._plan.parameters]

    def clear(self) -> None:
        """The step is over: lets the memory go."""
        self._blocks, self.hashes = [], None

    @property
    def nodes(self) -> list[Node]:
        """The maximal nodes of the grains that are here, in rising order."""
        return self._blocks[0].nodes if self._blocks else []

    @property
    def blocks(self) -> Sequence[NodeSums]:
        """The sums of each block; none between two steps."""
        return self._blocks

    def __getitem__(self, block: int) -> NodeSums:
        """A block's sums."""
        return self._blocks[block]

    def factor(self, weight: float) -> float:
        """What a grain's gradient is multiplied with."""
        assert self._grains is not None
        return float(leaf_factor(weight, self._grains.micro_batch, self._grains.count))

    def take(self, grain: int, weight: float, unscale: torch.Tensor | None) -> None:
        """Takes a grain's gradient out of `p.grad`, which is None afterwards."""
        for block in range(len(self._blocks)):
            self.take_block(block, grain, weight, unscale)

    def take_block(
        self, block: int, grain: int, weight: float, unscale: torch.Tensor | None
    ) -> None:
        """Takes a block of it."""
        parameters = self._plan.parameters[block]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._add(block, grain, leaves_of(gradients, self.factor(weight), unscale))

    def leave_out(self, grain: int) -> None:
        """A grain of weight 0, or without samples, is absent."""
        for block, parameters in enumerate(self._plan.parameters):
            self._add(block, grain, [None] * len(parameters))

    def hash_sent(self, block: int, flats: Sequence[torch.Tensor]) -> None:
        """Hashes the vectors that are sent of a block's maximal nodes, in rising order."""
        assert self.hashes is not None
        sums = self._blocks[block]
        for node, flat in zip(sums.nodes, flats, strict=True):
            self.hashes.take_flat(node, block, flat, sums[node])

    def digest(self, node: Node) -> bytes:
        """What is attested of a maximal node, once all are whole; empty: it is none."""
        if self.hashes is None or node not in self.nodes:
            return b""
        return self.hashes.digest(node)

    def flat(self, block: int, node: Node) -> Floats:
        """A block of a maximal node as it travels: -0.0 where a component is absent."""
        parts = zip(self._blocks[block][node], self._plan.parameters[block], strict=True)
        return np.concatenate(
            [
                np.full(parameter.numel(), -0.0, np.float32)
                if part is None
                else part.detach().cpu().contiguous().numpy().reshape(-1)
                for part, parameter in parts
            ]
        )

    def hash_nodes(self) -> None:
        """Hashes all maximal nodes, which are whole; those that were are not hashed again."""
        assert self.hashes is not None
        if self._nodes_hashed:
            return
        self._nodes_hashed = True
        for block, sums in enumerate(self._blocks):
            for node in sums.nodes:
                self.hashes.take(node, block, sums[node])

    def _add(self, block: int, grain: int, leaf: Parts) -> None:
        self._nodes_hashed = False
        if self.hashes is not None:
            # Before it is added: a sum is made in the place of its left child.
            self.hashes.take(Node(grain, grain + 1), block, leaf)
        self._blocks[block].add(grain, leaf)


class NodeStaging:
    """A `Staging` of all sums of a block, which takes the last grain's gradients from `p.grad`."""

    def __init__(self, sums: GrainSums, make: Callable[[int], Staging]) -> None:
        """Makes no memory yet; `make` makes a staging for contribution 0, 1 and so on."""
        self._sums = sums
        self._make = make
        self._areas: list[Staging] = []
        self._last: tuple[int, float] | None = None

    def arm(self, grain: int, weight: float) -> None:
        """The gradients that `begin` gets next are a grain's, which completes all sums."""
        self._last = grain, weight

    def note(self, block: int) -> None:
        """See `Staging`."""
        self._area(0).note(block)

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Takes the last grain's, and begins to copy the sums; `scale` is that of the loss."""
        assert self._last is not None
        assert not isinstance(scale, float)
        self._sums.take_block(block, *self._last, scale)
        self.stage(block)

    def stage(self, block: int) -> None:
        """Begins to copy the sums of a block, which are whole."""
        sums = self._sums[block]
        for number, node in enumerate(sums.nodes):
            self._area(number).begin(block, sums[node], None)

    def ready(self, block: int) -> bool:
        """See `Staging`."""
        return all(each.ready(block) for each in self._present(block))

    def collect(self, block: int) -> torch.Tensor:
        """The first node's vector."""
        return self._area(0).collect(block)

    def flats(self, block: int) -> list[torch.Tensor]:
        """The vectors of all nodes, in rising order; waits for the copies."""
        return [each.collect(block) for each in self._present(block)]

    def put(self, block: int, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """See `Staging`."""
        self._area(0).put(block, gradients, flat)

    def close(self) -> None:
        """See `Staging`."""
        for each in self._areas:
            each.close()

    def _present(self, block: int) -> Iterator[Staging]:
        return (self._area(number) for number in range(len(self._sums[block].nodes)))

    def _area(self, number: int) -> Staging:
        while number >= len(self._areas):
            self._areas.append(self._make(len(self._areas)))
        return self._areas[number]
