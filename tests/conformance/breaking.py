"""Breaking: replaces a function of an implementation under test, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["put", "wrap"]


def put(owner: Any, name: Any, value: Any) -> None:
    """Replaces what a module, a class or a table has under this name."""
    table = isinstance(owner, dict)
    there = name in owner if table else hasattr(owner, name)
    assert there, f"{owner} has no {name}: this no longer breaks anything"
    if table:
        owner[name] = value
    else:
        setattr(owner, name, value)


def wrap(owner: Any, name: Any, wrong: Callable[..., Any]) -> None:
    """Calls `wrong` in place of a function, with that one as its first argument."""
    right = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    put(owner, name, lambda *arguments, **named: wrong(right, *arguments, **named))
