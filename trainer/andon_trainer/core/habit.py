"""The habit of a script: whether it goes straight from a commit to the next step.

A worker that asks for its next step before the present one is committed spares each step a round
trip. But the line may then assign that step at once, and if the script does something else first
(it evaluates, averages a number, leaves its epoch), the others have begun a round in which it is
missing. What a script will do can't be known. So a worker goes by what its script did after the
last commit: if it went straight on, it is expected to do so again.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Habit"]


@dataclass(slots=True)
class Habit:
    """What a script did between its last commit and its last request for work."""

    is_straight: bool = False
    """Whether it did nothing else."""
    _elsewhere: bool = True
    """Whether it has done something else since the last commit. A new worker has: it joined."""

    def committed(self) -> None:
        """A step is over."""
        self._elsewhere = False

    def does_something_else(self) -> None:
        """The script waits for something that is no part of a step, or is busy between two."""
        self._elsewhere = True

    def wants_work(self) -> None:
        """The script is back for its next step."""
        self.is_straight = not self._elsewhere
