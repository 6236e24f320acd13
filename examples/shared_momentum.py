"""Shared momentum: each window of local steps begins with the momentum of the last mean change.

With local steps a small GPT ends 0.4 % above one process instead of 1.4 %, in a hundredth of the
bytes (docs/guide/local-steps.md). Take `SharedMomentum` into your script, as `main` does:

    andon run --workers 3 --schedule local --local-steps 16 --encoding int4 \
        examples/shared_momentum.py

Theory of operation. At a window's end all workers take the same weights, but each keeps its own
Adam, whose momentum goes on in the direction that this worker came from. Adam moves a weight by
rate * m / sqrt(v). So the mean change of a window, divided by the sum of its rates, is about the
workers' mean of m / sqrt(v). All of them know it, and nothing more need travel: each makes it an m
by its own v.

What AdamW's weight decay takes away is a part of the change, too, and goes on with the momentum. If
f is the mean of beta1, beta1^2, ... over a window's steps, the decay counts 1 / (1 - f) times: with
a beta1 of 0.9, about twice in windows of 16 steps and four times in windows of 5.

The steps are watched by the optimizer's hooks, since only steps that move the weights count: the
loop body also runs where a line has nothing to compute for this worker. A window that the line
doubts is computed again from where it began. Adam then counts from there, too, which is how it is
recognised.

With `--fragments` a commit moves a part of the model, by what all steps since that part's last
exchange have changed. So each parameter has its own distance: the sum of the rates since the line
moved it last.

It goes with `--overlap`, if the mean arrives early in the next window (`--overlap-steps 1`): the
few steps that were made ahead then lose their own momentum.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

__all__ = ["SharedMomentum"]

MODULUS = 17


@dataclass(slots=True)
class _Exchanged:
    """A parameter as the line moved it last."""

    weights: Tensor
    distance: float | None
    """The sum of all rates until then; None if this worker does not know what came after."""


class SharedMomentum:
    """The momentum of this worker's Adam or AdamW, on a line of local steps.

    Use it without a quorum: the mean change is then one of the steps that all workers made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Watches the optimizer's steps from now on."""
        self._optimizer = optimizer
        self._last: list[list[_Exchanged]] = []
        """By group; empty: nothing was shared, and no step made."""
        self._distances: list[float] = []
        """The sum of the rates of all committed steps, by group."""
        self._committed = 0
        """How many steps Adam had counted by the last commit, without those made ahead."""
        self._rates: list[list[float]] = []
        """Of each step that no commit has: the rates, by group."""
        optimizer.register_step_pre_hook(self._stepping)
        optimizer.register_step_post_hook(self._stepped)

    @torch.no_grad()
    def share(self, steps: int) -> None:
        """The models hold the line's new weights: the momentum becomes that of their change.

        Call it where `line.committed` is true, within `line.common_weights()`. A worker that had no
        part in the window, or began in its middle, keeps its own.

        Args:
            steps: how many steps the worker made in the window (`line.local_steps`).
        """
        if not self._last:
            self._begin()
            return
        given, self._rates = self._rates[:steps], self._rates[steps:]
        had_part = 0 < steps == len(given)
        self._committed = self._steps() - len(self._rates)
        for number, group in enumerate(self._optimizer.param_groups):
            self._distances[number] += sum(rates[number] for rates in given)
            for weights, last in zip(group["params"], self._last[number], strict=True):
                if not torch.equal(weights, last.weights):
                    if had_part and last.distance is not None:
                        moved = self._distances[number] - last.distance
                        self._take(group, weights, last.weights - weights, moved)
                    last.weights, last.distance = weights.clone(), self._distances[number]
                elif not had_part:
                    last.distance = None  # Its next change has steps that were not seen here.

    def _take(self, group: dict[str, Any], weights: Tensor, change: Tensor, moved: float) -> None:
        beta1, beta2 = group["betas"]
        own = self._optimizer.state.get(weights)
        if own and moved:
            steps = own["step"]
            size = (own["exp_avg_sq"] / (1 - beta2**steps)).sqrt() + group["eps"]
            own["exp_avg"].copy_(change / moved * size * (1 - beta1**steps))

    def _begin(self) -> None:
        """Nothing is known of what was before; if Adam made no step, there was nothing."""
        self._rates, self._committed = [], self._steps()
        groups = self._optimizer.param_groups
        self._distances = [0.0 for _ in groups]
        known = None if self._committed else 0.0
        self._last = [
            [_Exchanged(part.detach().clone(), known) for part in group["params"]]
            for group in groups
        ]

    def _stepping(self, *_: Any) -> None:
        kept = self._steps() - self._committed
        if not self._last or not 0 <= kept <= len(self._rates):
            self._begin()  # The state is another one: it came from a worker, or a checkpoint.
        else:
            del self._rates[kept:]  # The line doubted these steps.

    def _stepped(self, *_: Any) -> None:
        self._rates.append([float(group["lr"]) for group in self._optimizer.param_groups])

    def _steps(self) -> int:
        """How many steps Adam has counted."""
        known = next(iter(self._optimizer.state.values()), None)
        return int(known["step"]) if known else 0


def main() -> None:
    """Trains a perceptron to add modulo 17, alone or with the other workers of the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    line = Line(seed=1)
    torch.manual_seed(1)
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    embedding, hidden = nn.Embedding(MODULUS, 32), nn.Linear(64, 64)
    model: Any = nn.Sequential(embedding, nn.Flatten(), hidden, nn.GELU(), nn.Linear(64, MODULUS))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(pairs, pairs.sum(1) % MODULUS), 32, shuffle=True)
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    momentum = SharedMomentum(optimizer)
    for _ in line.epochs(options.epochs):
        for asked, sums in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(asked), sums))
            optimizer.step()
            if line.committed:
                with line.common_weights():
                    momentum.share(line.local_steps)
    if line.is_main:
        print(f"step {line.step}: loss {line.loss:.6f}")


if __name__ == "__main__":
    main()
