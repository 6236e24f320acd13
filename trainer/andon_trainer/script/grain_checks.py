"""What a script can't have under `same_bits`: refused by name, with what would work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from andon_trainer.model.compilation import refuse_compilation

__all__ = ["refuse_other_grains", "refuse_without_grain"]


def refuse_without_grain(micro_batch_size: int | None) -> int:
    """The positions of a grain.

    Raises:
        ValueError: the script does not say.
    """
    if micro_batch_size is None:
        raise ValueError(
            "same_bits needs the number of samples that one forward sees, whatever the number of "
            "workers: line.prepare(..., micro_batch_size=8), or Fit(micro_batch_size=8)"
        )
    return micro_batch_size


def refuse_other_grains(objects: Sequence[Any]) -> None:
    """Looks at what `prepare` was given.

    Raises:
        ValueError: a model's forward sees more than a grain, or may compute other bits each time.
    """
    for model in objects:
        if not isinstance(model, nn.Module):
            continue
        for name, module in model.named_modules():
            where = name or type(model).__name__
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{where} is a SyncBatchNorm, whose forward sees the samples of other "
                    "processes: with same_bits use BatchNorm, whose running statistics are "
                    "averaged over all grains"
                )
            refuse_compilation(module, where)
