"""Excess: what a message of the control plane may not have more of, looked at before it is read.

A few megabytes can hold a million empty messages, or one shape whose product takes minutes. To
count costs nothing, and what is within the counts is read in a time that others can wait for.
"""

from __future__ import annotations

from andon.protocol.limits import MAX_COMPONENTS, MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_NUMBERS
from andon.v1 import layout_pb2

__all__ = ["LimitExceeded", "count_parts", "require_at_most", "require_small_layout"]


class LimitExceeded(ValueError):
    """A peer sent more of something than this protocol has room for: which limit, and how much."""


def require_at_most(count: int, most: int, what: str) -> None:
    """Refuses more of something than there may be.

    Raises:
        LimitExceeded: `count` is above `most`.
    """
    if count > most:
        raise LimitExceeded(f"{count} {what} are more than {most}, which is the limit")


def count_parts(message: layout_pb2.Layout) -> int:
    """Blocks and components of a layout.

    Raises:
        LimitExceeded: there are too many.
    """
    require_at_most(len(message.blocks), MAX_NUMBERS, "blocks of a layout")
    components = sum(len(block.components) for block in message.blocks)
    require_at_most(components, MAX_COMPONENTS, "components of a layout")
    return len(message.blocks) + components


def require_small_layout(message: layout_pb2.Layout) -> None:
    """Refuses a layout that would take too long to read, before anything of it is.

    Raises:
        LimitExceeded: too many blocks, components or dimensions, or too long a name.
    """
    count_parts(message)
    for block in message.blocks:
        _require_short(block.name)
        for component in block.components:
            require_at_most(len(component.shape), MAX_DIMENSIONS, "dimensions of a component")
            _require_short(component.name)


def _require_short(name: str) -> None:
    require_at_most(len(name.encode()), MAX_NAME_BYTES, "bytes of a name")
