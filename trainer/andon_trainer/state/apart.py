"""Apart: the first element in which weights are not those of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from andon.host.audit_files import WeightApart
from andon.host.manifest import CheckpointDamaged
from andon.protocol.halts import describe_value, shown
from andon_trainer.state.checkpoint_files import load_checkpoint
from andon_trainer.state.weights import named_state

__all__ = ["first_weight_apart"]


def first_weight_apart(modules: Sequence[nn.Module], folder: Path) -> WeightApart | None:
    """The first element, in the order in which weights are digested, whose bits differ.

    None: there is none, the checkpoint is gone or damaged, or it is of another model.
    """
    try:
        _, trees, base = load_checkpoint(folder, ("model",))
    except (FileNotFoundError, CheckpointDamaged):
        return None
    known = trees["model"] | base
    for name, tensor in named_state(modules):
        if not isinstance(tensor, nn.Parameter):
            continue
        there, here = known.get(name), tensor.detach().cpu()
        if there is None or (there.dtype, there.shape) != (here.dtype, here.shape):
            return None
        differ = np.flatnonzero(_bits(there) != _bits(here))
        if differ.size:
            at = int(differ[0]) // here.element_size()
            index = tuple(int(each) for each in np.unravel_index(at, here.shape))
            values = (_text(each.reshape(-1)[at]) for each in (there, here))
            return WeightApart(name, index, *values)
    return None


def _bits(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of all elements, C-contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _text(element: torch.Tensor) -> str:
    value = float(element)
    return shown(value) if element.dtype is torch.float32 else describe_value(value)
