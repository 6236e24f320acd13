"""All rows, by name."""

from __future__ import annotations

from integration.rows.coupled import COUPLED
from integration.rows.features import FEATURES
from integration.rows.orders import ORDERS
from integration.rows.row import Row
from integration.rows.scaled import SCALED
from integration.rows.streams import STREAMS
from integration.rows.trainer import TRAINER

__all__ = ["ROWS"]

ROWS: dict[str, Row] = {**FEATURES, **COUPLED, **ORDERS, **SCALED, **STREAMS, **TRAINER}
