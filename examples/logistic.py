"""Logistic regression, as clients/ trains it in Node, Go and C++: any of them can train together.

    ANDON_ADDRESS=127.0.0.1:7070 ANDON_RUN_ID=demo python examples/logistic.py --steps 50

Layout, plan and data are those of clients/README.md. Gradients may differ in their last bits
between languages, because `exp` does, but all workers get the same bytes of each average. So the
weights are the same to the bit, as long as every client rounds twice to float32: `rate * mean`, and
the difference. That is why there is an optimizer here: torch's SGD may fuse the two operations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from andon_trainer import Line
from andon_trainer.state.weights import weights_digest

DATA = Path(__file__).resolve().parents[1] / "clients" / "data" / "samples.csv"
FEATURES, GROUPS, BATCH, SEED, RATE = 8, 5, 32, 11, 0.1


class Logistic(nn.Module):
    """The log-odds of a label: a linear in the features, plus a constant for each group."""

    def __init__(self) -> None:
        """Draws initial weights."""
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1, bias=False)
        self.group = nn.Embedding(GROUPS, 1)

    def forward(self, features: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Log-odds, shape (samples,), of features (samples, 8) and groups (samples,)."""
        score: torch.Tensor = self.linear(features) + self.group(group)
        return score.squeeze(1)


class Descent(torch.optim.Optimizer):
    """Gradient descent by `w - rate * g`, with a rounding after each of the two operations."""

    def __init__(self, parameters: Any, lr: float) -> None:
        """Descends with the learning rate `lr`."""
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Moves every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"])


def load(path: Path = DATA) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features (float32, in sixteenths), groups (int64) and labels (float32)."""
    rows = torch.tensor(
        [[int(part) for part in line.split(",")] for line in path.read_text().splitlines()]
    )
    return rows[:, :FEATURES] / 16.0, rows[:, FEATURES], rows[:, FEATURES + 1].float()


def report(line: Line, model: nn.Module) -> str:
    """Step, loss and final weights of this worker, as one line of JSON."""
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return json.dumps(
        {
            "step": line.step,
            "loss": line.loss,
            "digest": weights_digest([model]).hex(),
            "weights": b"".join(weights).hex(),
        }
    )


def main() -> None:
    """Trains until the run is over, after `--steps` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--grain", type=int, help="samples of a grain: the same bits on any line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    line = Line(seed=SEED, total_steps=options.steps, same_bits=options.grain is not None)
    features, groups, labels = load()
    model = Logistic()
    optimizer = Descent(model.parameters(), RATE)
    line.prepare(model, optimizer, micro_batch_size=options.grain)

    for _ in line.epochs(10**6):  # `total_steps` ends the run.
        for shard in line.shards(len(labels), batch_size=BATCH):
            at = shard.indices
            optimizer.zero_grad()
            scores = model(features[at], groups[at])
            line.backward(F.binary_cross_entropy_with_logits(scores, labels[at]))
            optimizer.step()

    print(report(line, model), flush=True)


if __name__ == "__main__":
    main()
