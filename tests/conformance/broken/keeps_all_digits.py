"""Answers in INT8_BLOCK with a scale of more than 16 digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon.protocol.encoding import Encoding
from andon.protocol.messages import BlockGradient
from andon_reducer.core import jobs
from andon_reducer.core.mean import Mean, MeanDefect, weighted_mean
from conformance.breaking import serve_with

mean = weighted_mean


def precise(
    parts: Sequence[BlockGradient], encoding: Encoding, answer: Encoding, *more: Any
) -> Mean | MeanDefect:
    found = mean(parts, encoding, answer, *more)
    if isinstance(found, MeanDefect) or answer is not Encoding.INT8_BLOCK:
        return found
    payload = bytearray(found.payload)
    payload[0] |= 1
    return Mean(memoryview(payload), found.total_weight)


if __name__ == "__main__":
    serve_with((jobs, "weighted_mean", precise))
