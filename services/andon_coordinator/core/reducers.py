"""Reducers: those of the line, as the core knows them, and how the model is partitioned."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.layout import Layout
from andon.protocol.reducers import ReducerShare, partition

__all__ = ["Reducers"]


@dataclass(slots=True, kw_only=True)
class Reducers:
    """The reducers that are here, and how the model is partitioned among them."""

    own: bool = True
    """Whether the coordinator's own process is a reducer too; that one is always here."""
    _by_stream: dict[int, str] = field(default_factory=dict)
    _map: tuple[ReducerShare, ...] | None = None

    def __len__(self) -> int:
        """How many are here."""
        return len(self._by_stream) + self.own

    @property
    def addresses(self) -> tuple[str, ...]:
        """Their addresses; the coordinator's own reducer comes first, with an empty address."""
        others = sorted(self._by_stream.values())
        return ("", *others) if self.own else tuple(others)

    def stream_of(self, address: str) -> int | None:
        """The stream of the reducer that registered this address."""
        return next((each for each, at in self._by_stream.items() if at == address), None)

    def add(self, stream: int, address: str) -> None:
        """Adds a reducer that registered."""
        self._by_stream[stream] = address
        self._map = None

    def remove(self, stream: int) -> str | None:
        """Removes a reducer; returns its address, or None if it was removed before."""
        self._map = None
        return self._by_stream.pop(stream, None)

    def map_of(self, layout: Layout | None, chunk_elements: int) -> tuple[ReducerShare, ...]:
        """Which reducer averages which part of the model; empty before the model is known."""
        if layout is None:
            return ()
        if self._map is None:
            self._map = partition(layout, chunk_elements, self.addresses)
        return self._map
