"""Adds contributions from the last rank to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon.protocol.messages import BlockGradient
from andon_reducer.core import jobs
from andon_reducer.core.mean import Mean, MeanDefect, weighted_mean
from conformance.breaking import serve_with

mean = weighted_mean


def backwards(parts: Sequence[BlockGradient], *more: Any) -> Mean | MeanDefect:
    return mean(parts[::-1], *more)


if __name__ == "__main__":
    serve_with((jobs, "weighted_mean", backwards))
