"""Evaluating: the loss and the metrics of a validation set, each sample once over all workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from andon_trainer.fit.batches import samples_in, weighted
from andon_trainer.line.line import Line

__all__ = ["Metric", "evaluate"]

Metric = Callable[[Any, Any], Any]
"""Gets (model, batch), or what `predict` returned of a batch; returns a mean, or (mean, weight)."""


def evaluate(
    line: Line,
    model: nn.Module,
    loader: Any,
    measure: Callable[[Any], Mapping[str, Any]],
    names: Sequence[str],
) -> dict[str, float]:
    """The means over a validation set, each batch counted by its weight; the same on all workers.

    A batch's weight in a mean is the number of its samples, unless the function says another. So
    the means are those of the whole set, however it was divided into batches and among workers.

    Args:
        line: every worker of it evaluates after the same step.
        model: is in evaluation mode meanwhile.
        loader: is split among the workers.
        measure: what to average of a batch, by name: a mean, or a mean and its weight.
        names: of all that `measure` returns; a worker may have no batch to learn them from.
    """
    was_training = model.training
    if line.same_bits:
        model.eval()
        means = _tallied(line, loader, measure, names)
        model.train(was_training)
        return means
    while True:
        model.eval()
        sums = _sums(line.split(loader), measure, names)
        model.train(was_training)
        means, covered = {}, True
        for name, (total, weight) in sums.items():
            means[name] = line.mean(total / (weight or 1.0), weight=weight)
            covered = covered and line.covered
        if covered:
            return means
        # A worker was lost meanwhile, and its share with it: the others divide the whole set.


@torch.no_grad()
def _tallied(
    line: Line,
    loader: Any,
    measure: Callable[[Any], Mapping[str, Any]],
    names: Sequence[str],
) -> dict[str, float]:
    """The means on a line of same bits, which adds up whole batches in their order."""
    for batch in line.split(loader):
        sums = _sums([batch], measure, names)
        # Each name has a weight of its own, and a tally has one number of terms.
        parts = {f"sum {name}": total for name, (total, _) in sums.items()}
        parts |= {f"weight {name}": weight for name, (_, weight) in sums.items()}
        line.tally(parts, 1)
    found = line.tallied()
    if not isinstance(found, Mapping):  # There was no batch.
        return dict.fromkeys(names, math.nan)
    weights = {name: found[f"weight {name}"] for name in names}
    return {
        name: found[f"sum {name}"] / weight if weight else math.nan
        for name, weight in weights.items()
    }


@torch.no_grad()
def _sums(
    batches: Iterable[Any], measure: Callable[[Any], Mapping[str, Any]], names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Of each name the sum of the means, times their weights, and the sum of the weights."""
    sums = dict.fromkeys(names, (0.0, 0.0))
    for batch in batches:
        for name, result in measure(batch).items():
            mean, given = weighted(result, name)
            weight = samples_in(batch) if given is None else given
            if weight:  # A mean over nothing is not a number, and counts for nothing.
                total, weights = sums[name]
                sums[name] = total + float(mean) * weight, weights + weight
    return sums
