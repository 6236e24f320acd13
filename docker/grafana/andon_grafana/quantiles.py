"""The three quantiles that a curve of a time has."""

from __future__ import annotations

from andon_grafana.panels import Query
from andon_grafana.promql import quantile

__all__ = ["quantiles"]

_PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def quantiles(
    histogram: str, *, exemplars: bool = False, where: tuple[str, ...] = ()
) -> tuple[Query, ...]:
    """The median, the 95th and the 99th percentile; exemplars with the last."""
    return tuple(
        Query(
            expr=quantile(part, histogram, where=where),
            legend=name,
            exemplars=exemplars and name == "p99",
        )
        for name, part in _PARTS.items()
    )
