"""The model of some benchmarks' scripts: one square layer under AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line

__all__ = ["prepared"]


def prepared(line: Line, width: int, batch: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and loader on a line, computed by one thread.

    Args:
        line: the line.
        width: of the layer; three times its square are float32 of state.
        batch: samples of a step of all workers.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = TensorDataset(torch.randn(4096, width), torch.randn(4096, 1))
    found: tuple[Any, Any, Any] = line.prepare(model, optimizer, DataLoader(data, batch_size=batch))
    return found
