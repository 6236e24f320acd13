"""What the scripts beside this train, and where one of them spoils a batch when it is told to."""

import os

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BACKEND = os.environ.get("BACKEND", "andon")
"""`BACKEND=gloo` runs the same script on Gloo."""


def net() -> nn.Sequential:
    """A small classifier, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def dataset() -> TensorDataset:
    """Which of a row's first four numbers is the greatest."""
    numbers = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(numbers, numbers[:, :4].argmax(1))


def spoiled(x: Tensor, rank: int, step: int) -> Tensor:
    """The batch itself; with `PLANT_NAN=1:3` in the environment, rank 1's has a NaN in step 3.

    Not again when torchrun has started the processes again.
    """
    starts_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if os.environ.get("PLANT_NAN") == f"{rank}:{step}" and not starts_again:
        x = x.clone()
        x[0, 0] = float("nan")
    return x
