"""What becomes of autograd's graph after a backward: freed, kept, or made for another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from andon_trainer.model.guards import AccumulatedGradients

__all__ = ["FREED", "Graph"]


@dataclass(frozen=True, slots=True)
class Graph:
    """The arguments of `torch.Tensor.backward`."""

    retain: bool = False
    create: bool = False

    def goes_back(self, scalar: torch.Tensor, gradients: AccumulatedGradients) -> torch.Tensor:
        """A tensor with the same value and graph whose `backward()` takes these arguments.

        Parameters' gradients are left without a graph: they become the mean over all workers, of
        which no worker has the graph. Other tensors' gradients keep theirs.
        """
        if self == FREED:
            return scalar

        def backward() -> None:
            scalar.backward(  # type: ignore[no-untyped-call]  # torch's own signature
                retain_graph=self.retain or self.create, create_graph=self.create
            )
            gradients.detach()

        # Another object than `scalar`, to which it refers: no cycle may keep the graph alive.
        going = scalar.view(())
        going.backward = backward  # type: ignore[method-assign, assignment]  # of this object
        return going


FREED = Graph()
"""As `loss.backward()` leaves it."""
