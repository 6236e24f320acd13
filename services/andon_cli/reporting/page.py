"""Page: what a report shows, without its form; `markdown` and `html_page` draw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Curve", "Page", "Section", "Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of equally many cells under headings."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        """Refuses a row that does not fit."""
        assert all(len(row) == len(self.headings) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over the steps, of one run or of two beside each other."""

    name: str
    series: tuple[tuple[str, Sequence[tuple[int, float | None]]], ...]
    """The run and its points: a step, and the value there; None: not a number."""
    marks: tuple[tuple[int, str], ...] = ()
    """Steps at which something happened, and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page, with what it answers as its heading."""

    title: str
    says: tuple[str, ...] = ()
    """Sentences."""
    tables: tuple[Table, ...] = ()
    curves: tuple[Curve, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    """A command, and what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report."""

    title: str
    sections: tuple[Section, ...] = field(default=())
