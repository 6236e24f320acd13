"""The weights and losses of a step's grains, and their sums by node, in float64 along the tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from andon.protocol.grains import Grains, Node, NodeLoss, cover, fold
from andon.protocol.messages import TreeNode
from andon.protocol.shards import Ranges
from andon_trainer.averaging.readings import PendingNumbers
from andon_trainer.core.calls import NodePart

__all__ = ["GrainLosses"]


class GrainLosses:
    """What is known of the grains that this worker has computed of one batch."""

    def __init__(
        self, grains: Grains, share: Ranges, known: Mapping[int, tuple[float, float]] | None = None
    ) -> None:
        """Begins an attempt.

        Args:
            grains: those of the batch.
            share: this worker's positions.
            known: weight and weighted loss of grains that an earlier attempt has computed.
        """
        self.grains = grains
        self._share = grains.of(share)
        self._weights = {grain: weight for grain, (weight, _) in (known or {}).items()}
        self._losses = {grain: loss for grain, (_, loss) in (known or {}).items()}
        self._coming: list[tuple[int, PendingNumbers]] = []

    def add(self, grain: int, weight: float, loss: PendingNumbers | None) -> None:
        """Adds a grain; without a weight it has no loss."""
        self._weights[grain] = weight
        if weight and loss is not None:
            self._coming.append((grain, loss))
        else:
            self._losses[grain] = 0.0

    def take(self, known: Mapping[int, tuple[float, float]]) -> None:
        """Adds what another process of this worker knows: weight and weighted loss of grains."""
        self._weights |= {grain: weight for grain, (weight, _) in known.items()}
        self._losses |= {grain: loss for grain, (_, loss) in known.items()}

    @property
    def missing(self) -> list[int]:
        """The grains of the share that were not added: those without a sample, at its end."""
        return [grain for grain in _each(self._share) if grain not in self._weights]

    @property
    def known(self) -> dict[int, tuple[float, float]]:
        """Weight and weighted loss of each grain; the losses are waited for."""
        self._collect()
        return {grain: (weight, self._losses[grain]) for grain, weight in self._weights.items()}

    @property
    def parts(self) -> tuple[NodePart, ...]:
        """The nodes of the share with their weights, in rising order."""
        count, size = self.grains.count, self.grains.micro_batch
        return tuple(
            NodePart(
                TreeNode(first=node.first, grains=len(node), batch_grains=count, grain=size),
                _along_tree(node, self._weights),
            )
            for node in cover(self._share, count)
        )

    @property
    def nodes(self) -> tuple[NodeLoss, ...]:
        """The nodes of the share with their weights and losses; waits for the losses."""
        self._collect()
        return tuple(
            NodeLoss(node, _along_tree(node, self._weights), _along_tree(node, self._losses))
            for node in cover(self._share, self.grains.count)
        )

    def _collect(self) -> None:
        coming, self._coming = self._coming, []
        for grain, loss in coming:
            self._losses[grain] = self._weights[grain] * loss.number()


def _along_tree(node: Node, numbers: Mapping[int, float]) -> float:
    leaves = {Node(grain, grain + 1): numbers[grain] for grain in range(node.first, node.stop)}
    return fold(leaves, node, lambda left, right: left + right)


def _each(ranges: Ranges) -> Iterable[int]:
    return (grain for part in ranges for grain in range(part.start, part.stop))
