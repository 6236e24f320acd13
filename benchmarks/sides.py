"""The two sides of a benchmark of exchanges: a step on the line, and Gloo's all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from protocol_worker import ProtocolWorker

__all__ = ["exchange_step", "mean_by_gloo"]


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
