"""A GPT of any size, and made-up text that it can learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["GPT", "LETTERS", "Batch", "Letters"]

LETTERS = 256
HEADS = 8

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int) -> None:
        """Makes a block for vectors of `width` features."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, letters, width) to the same shape."""
        batch, letters, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, letters, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, letters, width))
        thought: Tensor = self.mlp(x)
        return x + thought


class GPT(nn.Module):
    """A GPT with about 12 * layers * width^2 parameters."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        """Initializes the same weights in every process."""
        torch.manual_seed(1)
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps letters (batch, length) to logits (batch, length, alphabet)."""
        x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Letters(Dataset[Batch]):
    """Learnable, made-up text; each sample is a function of its index."""

    def __init__(self, size: int, context: int) -> None:
        """Makes `size` samples of `context` letters."""
        self._size = size
        self._context = context

    def __len__(self) -> int:
        """The number of samples."""
        return self._size

    def __getitem__(self, index: int) -> Batch:
        """The letters of a sample, and the letter after each."""
        places = torch.arange(self._context + 1)
        text = (places * (index % 7 + 1) + index) % LETTERS
        return text[:-1], text[1:]
