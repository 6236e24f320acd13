"""The two sides of a benchmark of exchanges: a step on the line, and Gloo's all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from protocol_worker import ProtocolWorker

__all__ = ["TOLERANCES", "exchange_step", "mean_by_gloo"]

TOLERANCES: dict[str, tuple[float, float]] = {
    "float32": (1e-4, 1e-6),
    "float16": (4e-3, 4e-3),
    "bfloat16": (3e-2, 3e-2),
    "int8": (0, 0.07),
    "int4": (0, 1.0),
}
"""Relative and absolute tolerance of a line's means against Gloo's, for normal numbers: a few units
in the last place of what was sent. In 8 and 4 bits a unit is a 127th and a 7th of the greatest of
some numbers, which is 5 at most."""


def exchange_step(worker: ProtocolWorker, blocks: Sequence[npt.NDArray[np.float32]]) -> None:
    """Runs one step of the protocol.

    Raises:
        RuntimeError: the service ended.
    """
    if not worker.step(blocks):
        raise RuntimeError("the service ended during the benchmark: see its log")


def mean_by_gloo(tensor: torch.Tensor) -> None:
    """Replaces a float32 tensor by its mean over all ranks of the group."""
    dist.all_reduce(tensor)
    tensor.div_(dist.get_world_size())
