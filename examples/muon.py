"""A perceptron learns to add modulo 17, its hidden matrices trained by Muon, the rest by AdamW.

Run it alone, or with `andon run --workers 2 examples/muon.py` to the same result. On a thin network
add `--schedule local --local-steps 16 --encoding int4`: Muon is a good optimizer for local steps.
Muon is Keller Jordan's (https://kellerjordan.github.io/posts/muon, 2024), as PyTorch has it; inside
local steps it was first used by B. Therien et al., "MuLoCo", arXiv:2505.23725.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

MODULUS = 17


class Adder(nn.Module):
    """Two numbers in, scores of their sum out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODULUS, 32)
        self.hidden = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False), nn.GELU()
        )
        self.head = nn.Linear(64, MODULUS)

    def forward(self, pairs: Tensor) -> Tensor:
        """Maps (batch, 2) to (batch, MODULUS)."""
        scores: Tensor = self.head(self.hidden(self.embedding(pairs).flatten(1)))
        return scores


def optimizers_of(model: nn.Module, hidden: nn.Module, rate: float) -> list[Optimizer]:
    """Muon for the matrices of `hidden`, AdamW for everything else: embeddings, heads, vectors.

    With `match_rms_adamw` (J. Liu et al., "Muon is Scalable", arXiv:2502.16982) an update is as
    large as AdamW's, so one learning rate does for both.
    """
    matrices = [part for part in hidden.parameters() if part.ndim == 2]
    by_muon = {id(part) for part in matrices}
    others = [part for part in model.parameters() if id(part) not in by_muon]
    muon = Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(others, lr=rate)]


def main() -> None:
    """Trains, alone or with the other workers of the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    line = Line(seed=1, total_steps=options.steps)
    torch.manual_seed(1)
    numbers = torch.arange(MODULUS)
    pairs = torch.cartesian_prod(numbers, numbers)
    model: Any = Adder()
    muon, adamw = optimizers_of(model, model.hidden, rate=1e-2)
    loader: Any = DataLoader(TensorDataset(pairs, pairs.sum(1) % MODULUS), 32, shuffle=True)
    model, muon, adamw, loader = line.prepare(model, muon, adamw, loader)
    for _ in line.epochs(options.steps):  # `total_steps` ends the run, in mid-epoch or not.
        for asked, sums in loader:
            muon.zero_grad()
            adamw.zero_grad()
            line.backward(F.cross_entropy(model(asked), sums))
            muon.step()
            adamw.step()
    if line.is_main:
        print(f"step {line.step}: loss {line.loss:.6f}")


if __name__ == "__main__":
    main()
