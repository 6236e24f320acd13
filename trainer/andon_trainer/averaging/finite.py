"""Whether gradients are finite: one cheap look at all of them, for the usual case that they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["PlacedGradient", "groups_of", "signs_of"]

PlacedGradient = tuple[int, int, torch.Tensor]
"""A parameter's block, its index there, and its gradient."""


def groups_of(gradients: Iterable[PlacedGradient]) -> list[list[PlacedGradient]]:
    """The gradients by device and dtype: torch looks at all of a group in one go."""
    groups: dict[tuple[torch.device, torch.dtype], list[PlacedGradient]] = {}
    for each in gradients:
        groups.setdefault((each[2].device, each[2].dtype), []).append(each)
    return list(groups.values())


def signs_of(alike: list[PlacedGradient]) -> torch.Tensor:
    """A number for each gradient, which is finite only if all elements are: shape (gradients,)."""
    dense = [each._values() if each.is_sparse else each for _, _, each in alike]
    if dense[0].device.type == "cpu":
        return torch.stack([each.sum() for each in dense])  # Quicker than a norm there.
    return torch.stack(torch._foreach_norm(dense))
