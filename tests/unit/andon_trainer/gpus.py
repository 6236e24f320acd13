"""Tests that need a GPU: marked `cuda`, and skipped with what to install where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

__all__ = ["CUDA", "needs_cuda"]

CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device and a CUDA build of torch; then: make gpu",
    ),
)
"""The marks, of a parameter."""

Test = TypeVar("Test", bound=Callable[..., Any])


def needs_cuda(test: Test) -> Test:
    """Marks a whole test."""
    for mark in CUDA:
        test = mark(test)
    return test
