"""Fast copies of a core: everything that may change is copied, frozen values are shared."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

__all__ = ["copied", "names_of"]

_SHARED: dict[type, bool] = {int: True, str: True, float: True, bool: True, type(None): True}
_NAMES: dict[type, tuple[str, ...] | None] = {}


def copied(value: Any) -> Any:
    """A copy that shares nothing mutable; two references to one object stay that."""
    return _copy(value, {})


def names_of(value: object) -> tuple[str, ...]:
    """The attributes of an object, those in slots too."""
    kind = type(value)
    names = _NAMES.get(kind, ())
    if kind not in _NAMES:
        slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
        names = _NAMES[kind] = None if hasattr(value, "__dict__") else tuple(slots)
    return tuple(vars(value)) if names is None else names


def _copy(value: Any, known: dict[int, Any]) -> Any:
    kind = type(value)
    shared = _SHARED.get(kind)
    if shared is None:
        shared = _SHARED[kind] = _is_shared(value)
    if shared:
        return value
    copy = known.get(id(value))
    if copy is not None:
        return copy
    if kind is dict:
        copy = known[id(value)] = {name: _copy(each, known) for name, each in value.items()}
    elif kind is list:
        copy = known[id(value)] = [_copy(each, known) for each in value]
    elif kind is set:
        copy = known[id(value)] = set(value)
    elif kind is deque:
        copy = known[id(value)] = deque(value, value.maxlen)
    else:
        copy = known[id(value)] = object.__new__(kind)
        for name in names_of(value):
            each = getattr(value, name)
            if not _SHARED.get(type(each)):
                each = _copy(each, known)
            object.__setattr__(copy, name, each)
    return copy


def _is_shared(value: Any) -> bool:
    if isinstance(value, enum.Enum | int | tuple | frozenset | bytes | memoryview) or callable(
        value
    ):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)
