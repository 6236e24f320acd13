"""Process groups of ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

from andon_torch.gate import GateMode, GradientWatch
from andon_torch.process_group import AndonProcessGroup
from andon_torch.testing import FakeRanks

TIMEOUT = timedelta(seconds=30)


class TorchRanks:
    """One group for each rank, and what they have in common."""

    def __init__(self, size: int = 3, mode: GateMode = GateMode.BACKWARD) -> None:
        self.ranks = FakeRanks(size)
        self.watch = GradientWatch(mode)
        self.ended: list[int] = []
        self.groups = [
            AndonProcessGroup(
                self.ranks.caller(rank),
                "0",
                TIMEOUT,
                self.watch,
                lambda rank=rank: self.ended.append(rank),  # type: ignore[misc]
            )
            for rank in range(size)
        ]

    def all_call(self, call: Callable[[AndonProcessGroup], Work]) -> list[Work]:
        """All ranks make a call, and wait for it."""
        works = [call(group) for group in self.groups]
        for work in works:
            work.wait()
        return works
