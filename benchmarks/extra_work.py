"""Extra work makes a worker slow: it trains on its samples more often than once, without effect."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["ExtraWork"]


class ExtraWork:
    """Does a worker's samples again with a twin of its model.

    The line's model, its gradients and its hooks are not touched.
    """

    def __init__(self, twin: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        """Starts without debt; `loss_of` takes the twin and samples."""
        self._twin = twin
        self._loss_of = loss_of
        self._debt = 0.0

    def do(self, factor: float, x: Tensor, y: Tensor) -> None:
        """Does (`factor` - 1) times the work of these samples; parts of a sample add up."""
        self._debt += (factor - 1.0) * len(x)
        while self._debt >= 1.0:
            count = min(int(self._debt), len(x))
            loss = self._loss_of(self._twin, x[:count], y[:count])
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self._twin.zero_grad()
            self._debt -= count
