"""All rows, by name."""

from __future__ import annotations

from integration.rows.features import FEATURES
from integration.rows.row import Row

__all__ = ["ROWS"]

ROWS: dict[str, Row] = {**FEATURES}
