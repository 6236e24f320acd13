"""The section of a report that says who was slow and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from andon.protocol.limits import on_one_line
from andon.protocol.slowness import Slowness
from andon_cli.drawing.texts import date_text
from andon_cli.reporting.page import Section, Table

__all__ = ["slow_section"]

_ROWS = 100


def slow_section(found: Sequence[Slowness]) -> Section:
    """Who was slow and why, the newest last; nothing if nobody was."""
    if not found:
        return Section(title="Who was slow and why")
    counted = Counter((each.worker, each.phase.label) for each in found).most_common()
    often = ", ".join(f"worker {worker} in {phase} {times}×" for (worker, phase), times in counted)
    says = [f"The others waited for long: {often}. The journal keeps a few of them an hour."]
    if len(found) > _ROWS:
        says.append(f"The last {_ROWS} of {len(found)}; JSON has all.")
    rows = tuple(
        (
            date_text(each.at_unix_s),
            str(each.step),
            f"worker {each.worker}",
            each.phase.label,
            f"{each.late_s:.1f} s",
            on_one_line(each.text),
        )
        for each in found[-_ROWS:]
    )
    headings = ("when", "step", "who", "in", "late", "why")
    return Section(
        title="Who was slow and why",
        says=tuple(says),
        tables=(Table(headings=headings, rows=rows),),
    )
