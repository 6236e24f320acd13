"""An environment that remembers what was asked of it: for tests that a variable is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["Watched"]


class Watched(Mapping[str, str]):
    """An environment that remembers what was asked of it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)
