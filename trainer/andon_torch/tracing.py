"""Keeps torch.compile out of the process group's methods."""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

_Type = TypeVar("_Type", bound=type[Any])


def untraced(group: _Type) -> _Type:
    """A class whose public methods torch.compile calls as they are, and does not look into."""
    for name, member in list(vars(group).items()):
        if isinstance(member, FunctionType) and (not name.startswith("_") or name in _OLD_NAMES):
            setattr(group, name, _untraced(member))
    return group


_OLD_NAMES = frozenset(
    {"_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing"}
)
"""Methods that PyTorch calls though their names are private."""


@functools.cache
def _untraced(function: FunctionType) -> Any:
    """A function that torch.compile calls as it is.

    `torch.compiler.disable` imports the compiler, which takes seconds. Nothing is traced before
    that is there, so it is used from then on.
    """
    disabled: Any = None

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **named)
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **named)

    # What `torch.compiler.disable` would mark: graphs break where it is called.
    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch reads it
    return called
