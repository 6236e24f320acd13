"""A residual network for small images, as in He et al. 2015 (section 4.2): BatchNorm and all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet"]


class _Block(nn.Module):
    """Two convolutions, and the way around them."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(made)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or given != made:
            self.around = nn.Sequential(
                nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, channels, height, width) to `made` channels, 1 / `stride` as high."""
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.around(x))


class ResNet(nn.Module):
    """A ResNet with `6 * depth + 2` layers."""

    def __init__(self, *, depth: int = 3, width: int = 16, classes: int = 10) -> None:
        """Makes three stages of `depth` blocks, the first with `width` channels."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        given = width
        for stage in range(3):
            for index in range(depth):
                made = width * 2**stage
                blocks.append(_Block(given, made, 2 if stage and not index else 1))
                given = made
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(given, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (batch, 3, height, width) to logits (batch, classes)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits
