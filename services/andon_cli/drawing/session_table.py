"""A session's ranks as a table: what each one does, and for how long."""

from __future__ import annotations

from andon_cli.client import LineStatus, RankStatus, SessionStatus
from andon_cli.drawing.texts import aligned, waiting_line

__all__ = ["session_lines"]

_HEADINGS = (
    "rank", "host", "device", "state", "steps", "exchange", "input", "calls", "pending call",
)  # fmt: skip
_SILENT_S = 2.0
"""A rank that was not heard for so long is marked; it reports about every second."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def session_lines(status: LineStatus, session: SessionStatus) -> list[str]:
    """The status of a run of sessions, as lines."""
    parts = [f"run {status.run_id}", status.state, f"step {status.step}"]
    if session.key:
        parts += [f"session {session.key}", f"{session.world_size} ranks"]
    lines = ["  ".join(parts)]
    if waiting := waiting_line(status):
        lines.append(waiting)
    if session.last_message and not session.key:
        lines.append(f"the session before ended ({session.last_end}): {session.last_message}")
    if session.ranks:
        lines += aligned([_HEADINGS, *(_row(each) for each in session.ranks)])
    return lines


def _row(rank: RankStatus) -> tuple[str, ...]:
    overflows = f" ({rank.overflows} overflowed)" if rank.overflows else ""
    silent = f", not heard for {rank.silent_s:.0f} s" if rank.silent_s >= _SILENT_S else ""
    return (
        str(rank.rank),
        rank.host or "-",
        rank.device or "-",
        rank.state + silent,
        f"{rank.steps}{overflows}",
        f"{rank.exchange_ratio * 100:.0f} %",
        _bytes(rank.bytes),
        str(rank.calls),
        _pending(rank),
    )


def _pending(rank: RankStatus) -> str:
    if not rank.pending:
        return "-"
    missing = f", without {', '.join(map(str, rank.missing))}" if rank.missing else ""
    return f"{rank.pending}, {rank.pending_s:.1f} s{missing}"


def _bytes(number: float) -> str:
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError("the last unit takes all")
