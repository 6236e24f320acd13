"""Curves: a run's steps as numbers over time, reduced to what a chart can show.

SQLite does the reduction, because it lets go of Python's lock meanwhile: the coordinator's event
loop goes on while somebody looks at a run of a million steps.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from andon.protocol.records import RecordKind

__all__ = ["CurvePoint", "reduced_scalar_curve", "step_curve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One or more consecutive committed steps; `loss` is None if none of their losses is finite."""

    step: int
    """The last of them."""
    loss: float | None
    """The mean of those that are finite."""
    loss_min: float | None
    loss_max: float | None
    step_seconds: float
    """The mean."""
    samples_per_second: float
    at_unix_s: float
    """When the last of them was committed."""
    gradient_norm: float | None = None
    """The mean of those that are finite; None if there is none, or the line does not ask for it."""


_LARGEST = 1.7976931348623157e308

_QUERY = f"""
WITH known AS (
    SELECT
        id, kind, step, seconds, samples, at,
        CASE WHEN abs(gradient_norm) <= {_LARGEST} THEN gradient_norm END AS norm,
        CASE WHEN abs(loss) <= {_LARGEST} THEN loss END AS loss,
        -- A later record with an earlier step: the line was rolled back behind this one.
        min(step) OVER (ORDER BY id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS later
    FROM records
)
SELECT
    max(step), avg(loss), min(loss), max(loss), avg(seconds),
    CASE WHEN sum(seconds) > 0 THEN sum(samples) / sum(seconds) ELSE 0.0 END, max(at),
    avg(norm)
FROM known
WHERE kind = '{RecordKind.STEP.name}' AND (later IS NULL OR step <= later)
GROUP BY (step - 1) / :width
ORDER BY 1
"""


_SCALAR_QUERY = f"""
WITH logged AS (
    SELECT
        step,
        CASE WHEN count(value) = count(*) AND abs(avg(value)) <= {_LARGEST} THEN avg(value) END
            AS value,
        row_number() OVER (ORDER BY step) - 1 AS number
    FROM scalars WHERE name = :name GROUP BY step
)
SELECT max(step), avg(value) FROM logged GROUP BY number / :width ORDER BY 1
"""


def reduced_scalar_curve(
    database: sqlite3.Connection, name: str, points: int
) -> list[tuple[int, float | None]]:
    """What scripts logged under a name, as at most `points` steps and values.

    A step's value is the mean over the workers. A point's is the mean over those of its steps whose
    value is finite, None if none is; it stands at the last of them.
    """
    tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'scalars'"
    if not database.execute(tables).fetchone()[0]:
        return []
    counted = database.execute("SELECT count(DISTINCT step) FROM scalars WHERE name = ?", (name,))
    width = max(1, -(-counted.fetchone()[0] // points))
    found = database.execute(_SCALAR_QUERY, {"name": name, "width": width})
    return [(step, value) for step, value in found]


def step_curve(database: sqlite3.Connection, points: int) -> list[CurvePoint]:
    """The committed steps of the line's history, first to last, as at most `points` points."""
    steps: int | None = database.execute("SELECT max(step) FROM records").fetchone()[0]
    found = database.execute(_QUERY, {"width": max(1, -(-(steps or 0) // points))})
    return [
        CurvePoint(
            step=step,
            loss=loss,
            loss_min=least,
            loss_max=most,
            step_seconds=seconds,
            samples_per_second=rate,
            at_unix_s=at,
            gradient_norm=norm,
        )
        for step, loss, least, most, seconds, rate, at, norm in found
    ]
