"""Traffic: how many bytes of chunks went, by data path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one worker sent and received, in bytes of chunks, by the `path` of metrics."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @classmethod
    def over(cls, path: str, sent: int, received: int) -> Self:
        """What went over one path."""
        return cls(Counter({path: sent}), Counter({path: received}))

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.sent + other.sent, self.received + other.received)
