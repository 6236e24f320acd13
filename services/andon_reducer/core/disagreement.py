"""Disagreements: a rank contradicts the others, or itself, and the round is void."""

from __future__ import annotations

__all__ = ["Disagreement", "differs"]


class Disagreement(Exception):
    """A rank contradicts the others, or itself. `value` is what it sent."""

    def __init__(self, rank: int, message: str, value: object) -> None:
        """Names the rank and the contradiction."""
        super().__init__(message)
        self.rank = rank
        self.value = str(value)


def differs(rank: int, what: str, mine: object, theirs: object) -> Disagreement:
    """A rank has another value of something than the others."""
    mine, theirs = getattr(mine, "name", mine), getattr(theirs, "name", theirs)
    return Disagreement(rank, f"rank {rank} has {what} {mine}, others {theirs}", mine)
