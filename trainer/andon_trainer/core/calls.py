"""Calls: the exchanges of one round, in the order in which every worker makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from andon.protocol.messages import Operation

__all__ = ["Bytes", "Call"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One exchange of a round: of some blocks, of bytes, or of nothing (all meet).

    `data` is what rank 0 sends, or where what it sends arrives; its first `head_bytes` say what
    the bytes are, and must be the same on every worker.
    """

    name: str
    """What the script called, for people."""
    sequence: int = 0
    """Its number in the round; calls pair by it."""
    blocks: range = range(0)
    data: Bytes | None = None
    head_bytes: int = 0

    @property
    def operation(self) -> Operation | None:
        """What the reducer does for it; None if all abstain."""
        if self.data is not None:
            return Operation.BROADCAST
        return Operation.WEIGHTED_MEAN if self.blocks else None
