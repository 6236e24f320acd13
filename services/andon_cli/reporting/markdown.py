"""Markdown: a report as text, for a pull request or a terminal; curves are rows of little bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from andon_cli.drawing.texts import sparkline
from andon_cli.reporting.page import Curve, Page, Section, Table

__all__ = ["markdown"]

_CELLS = 60
_SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\`*_[]<>|#"})


def markdown(page: Page) -> str:
    """A page as Markdown, in GitHub's dialect."""
    lines = [f"# {_escaped(page.title)}"]
    for section in page.sections:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    if section.says:
        yield ""
        yield from (f"{_escaped(each)}  " for each in section.says)
    if section.commands:
        yield ""
        for command, effect in section.commands:
            yield f"- {_code(command)}: {_escaped(effect)}"
    for table in section.tables:
        yield ""
        yield from _table(table)
    for curve in section.curves:
        yield ""
        yield from _curve(curve)


def _table(table: Table) -> Iterator[str]:
    yield _row(table.headings)
    yield _row(["---"] * len(table.headings), raw=True)
    yield from map(_row, table.rows)


def _row(cells: Sequence[str], *, raw: bool = False) -> str:
    return f"| {' | '.join(cells if raw else map(_escaped, cells))} |"


def _curve(curve: Curve) -> Iterator[str]:
    yield f"**{_escaped(curve.name)}**"
    for run, points in curve.series:
        known = [(step, value) for step, value in points if value is not None]
        if not known:
            continue
        bars = sparkline([math.nan if each is None else each for _, each in points], _CELLS)
        (first, begun), (last, ended) = known[0], known[-1]
        yield f"- {_escaped(run)}: `{bars}` {begun:.4g} (step {first}) to {ended:.4g} (step {last})"


def _code(text: str) -> str:
    """Text as code, whatever backquotes it has."""
    fence = "`"
    while fence in text:
        fence += "`"
    gap = " " if "`" in text else ""
    return f"{fence}{gap}{text}{gap}{fence}"


def _escaped(text: str) -> str:
    """Text of which nothing is taken for Markdown."""
    return text.translate(_SPECIAL)
