"""HTML: a report as one file that needs nothing else: no script, no font, no address.

Curves are SVG with their values as text beside them, so nothing is told by a line alone. Everything
that a script or a worker said is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from andon_cli.reporting.page import Curve, Page, Section, Table

__all__ = ["html_page"]

_WIDTH, _HEIGHT, _MARGIN = 640, 160, 8
_STROKES = ("var(--first)", "var(--second)")

_STYLE = """
:root { color-scheme: light dark; --first: #1f6feb; --second: #b35900; --line: #8886;
  --paper: #ffffff; --ink: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --first: #79b8ff; --second: #ffab70;
  --paper: #0d1117; --ink: #e6edf3; } }
body { background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1, p, li { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.2rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .15rem .75rem .15rem 0; }
th { font-weight: 600; } td { overflow-wrap: anywhere; }
thead th { border-bottom: 1px solid var(--line); }
code { font-family: ui-monospace, monospace; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; }
svg { display: block; box-sizing: border-box; max-width: 100%; height: auto; }
svg { border: 1px solid var(--line); }
.mark { stroke: #d1242f; stroke-dasharray: 3 3; }
"""


def html_page(page: Page) -> str:
    """A page as one HTML document."""
    body = "\n".join(line for section in page.sections for line in _section(section))
    title = escape(page.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    yield from (f"<p>{escape(each)}</p>" for each in section.says)
    if section.commands:
        yield "<ul>"
        for command, effect in section.commands:
            yield f"<li><code>{escape(command)}</code>: {escape(effect)}</li>"
        yield "</ul>"
    yield from map(_table, section.tables)
    yield from map(_curve, section.curves)
    yield "</section>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in table.headings)
    rows = "\n".join(_row(row) for row in table.rows)
    return (
        f'<div class="wide" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(row: Sequence[str]) -> str:
    name, *cells = map(escape, row)
    return (
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{each}</td>" for each in cells) + "</tr>"
    )


def _curve(curve: Curve) -> str:
    known = [
        (step, value) for _, points in curve.series for step, value in points if value is not None
    ]
    if not known:
        return ""
    first, last = min(step for step, _ in known), max(step for step, _ in known)
    low, high = min(value for _, value in known), max(value for _, value in known)

    def x(step: int) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * (step - first) / max(1, last - first)

    def y(value: float) -> float:
        part = (value - low) / (high - low) if high > low else 0.5
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * part

    said = f"{curve.name}: from {low:.4g} to {high:.4g}, steps {first} to {last}"
    parts = [
        f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="0" y2="{_HEIGHT}">'
        f"<title>{escape(what)}</title></line>"
        for step, what in curve.marks
        if first <= step <= last
    ]
    for (run, points), stroke in zip(curve.series, _STROKES, strict=False):
        for piece in _pieces(points):
            if len(piece) == 1:
                piece *= 2  # A line of one point is not drawn.
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in piece)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{stroke}" '
                f'stroke-width="2" stroke-linecap="round">'
                f"<title>{escape(run)}</title></polyline>"
            )
    drawn = "\n".join(parts)
    return (
        f"<figure>\n<figcaption>{escape(curve.name)}</figcaption>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(said)}">\n{drawn}\n</svg>\n<p>{_ends(curve)}</p>\n</figure>'
    )


def _pieces(points: Sequence[tuple[int, float | None]]) -> Iterator[list[tuple[int, float]]]:
    """The runs of points that are numbers: a line has a gap where there is none."""
    piece: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None:
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _ends(curve: Curve) -> str:
    """The first and last value of each run, in words."""
    said = []
    for (run, points), stroke in zip(curve.series, _STROKES, strict=False):
        known = [(step, value) for step, value in points if value is not None]
        if known:
            (first, begun), (last, ended) = known[0], known[-1]
            said.append(
                f'<span style="color: {stroke}">{escape(run)}</span>: {begun:.4g} (step {first}) '
                f"to {ended:.4g} (step {last}), lowest {min(each for _, each in known):.4g}, "
                f"highest {max(each for _, each in known):.4g}"
            )
    return "<br>".join(said)
