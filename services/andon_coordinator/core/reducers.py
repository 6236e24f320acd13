"""Reducers: those that are there, and the map that each round is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.layout import Layout
from andon.protocol.reducers import ReducerShare, partition

__all__ = ["Reducers"]


@dataclass(slots=True, kw_only=True)
class Reducers:
    """The reducers of a line. The coordinator's own, if it has one, is there for as long as it."""

    own: bool = True
    """Whether the coordinator's process averages, too."""
    _by_stream: dict[int, str] = field(default_factory=dict)
    _map: tuple[ReducerShare, ...] | None = None

    def __len__(self) -> int:
        """How many are there."""
        return len(self._by_stream) + self.own

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they are, the coordinator's own first; that one's address is empty."""
        others = sorted(self._by_stream.values())
        return ("", *others) if self.own else tuple(others)

    def stream_of(self, address: str) -> int | None:
        """The stream on which an address is offered now."""
        return next((each for each, at in self._by_stream.items() if at == address), None)

    def add(self, stream: int, address: str) -> None:
        """A reducer is there."""
        self._by_stream[stream] = address
        self._map = None

    def remove(self, stream: int) -> str | None:
        """A reducer is gone; its address, or None if it was off the map already."""
        self._map = None
        return self._by_stream.pop(stream, None)

    def map_of(self, layout: Layout | None, chunk_elements: int) -> tuple[ReducerShare, ...]:
        """Who averages what of a model, now; nothing before the model is known."""
        if layout is None:
            return ()
        if self._map is None:
            self._map = partition(layout, chunk_elements, self.addresses)
        return self._map
