"""Averages without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from andon.protocol.messages import BlockGradient
from andon_reducer.core import jobs
from andon_reducer.core.mean import Mean, MeanDefect, weighted_mean
from conformance.breaking import serve_with

mean = weighted_mean


def unweighted(parts: Sequence[BlockGradient], *more: Any) -> Mean | MeanDefect:
    found = mean([replace(part, weight=1.0) for part in parts], *more)
    total = sum(part.weight for part in parts)
    return replace(found, total_weight=total) if isinstance(found, Mean) else found


if __name__ == "__main__":
    serve_with((jobs, "weighted_mean", unweighted))
