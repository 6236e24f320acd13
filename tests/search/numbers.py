"""Numbers that mean something only relative to each other."""

from __future__ import annotations

__all__ = ["Incarnation", "Serial", "Stream", "Weights"]


class Stream(int):
    """A stream's number."""


class Incarnation(int):
    """A process."""


class Weights(int):
    """A model's weights, as a number of `search.weights`."""


class Serial(int):
    """Makes numbers that are never used twice, and means nothing by itself."""
