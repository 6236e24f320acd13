"""A small ResNet with BatchNorm and augmentation learns which way a bar lies in a noisy image.

Run it alone, or with `andon run --workers 2 examples/vision.py` to the same result: BatchNorm sees
`micro_batch_size` images at a time, whoever computes them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from andon_trainer import Line


class Bars(Dataset[tuple[Tensor, int]]):
    """Images of 16 x 16 with a bar that lies flat, stands, or leans to one of two sides."""

    def __init__(self, *, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row, column = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        bar = [row - 8, column - 8, row - column, row + column - 16][index % 4].abs() <= 1
        image = 2.0 * bar + torch.randn(16, 16, generator=torch.Generator().manual_seed(index))
        if self.augment:  # The line seeds these numbers by position, not by worker.
            image = image.roll(torch.randint(-3, 4, (2,)).tolist(), (0, 1))
        return image[None], index % 4


class Block(nn.Module):
    """Two convolutions with BatchNorm, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


@torch.no_grad()
def evaluate(line: Line, model: nn.Module) -> float:
    """The part of images that is classified right; the workers divide them."""
    right = n = 0
    model.eval()
    for images, kinds in line.split(DataLoader(Bars(augment=False), batch_size=64)):
        right, n = right + int((model(images).argmax(1) == kinds).sum()), n + len(kinds)
    model.train()
    return line.mean(right / max(n, 1), weight=n)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()
line = Line(seed=1, total_steps=options.steps)
torch.manual_seed(1)
head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)]
model: nn.Module = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), Block(16), Block(16), *head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Bars(augment=True), batch_size=64, shuffle=True, drop_last=True)
model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=16)

for _ in line.epochs(options.steps):  # `total_steps` ends the run, in mid-epoch or not.
    for images, kinds in loader:
        optimizer.zero_grad()
        line.backward(F.cross_entropy(model(images), kinds))
        optimizer.step()
    accuracy = evaluate(line, model)
if line.is_main:
    print(f"{accuracy:.0%} are right\nstep {line.step}: loss {line.loss:.6f}")
