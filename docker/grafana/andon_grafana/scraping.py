"""Scrape health: does Prometheus see everything?"""

from __future__ import annotations

from andon_grafana.panels import GREEN, RED, YELLOW, Curve, Lanes, Number, Query, Row
from andon_grafana.promql import OF_WORKERS, by_process, latest, of

__all__ = ["ROW"]

_LIVE = latest("andon_workers", where=('state="live"',))
_SEEN = f"(sum({of('up', OF_WORKERS)}) or vector(0))"

_NOW = (
    Number(
        title="Endpoints that answer",
        tells="Of those that the service lists: itself, its workers, its separate reducers. Fewer "
        "than known: one is stuck, or Prometheus can't reach its port.",
        see="docs/runbooks/ScrapeFailing.md",
        queries=(
            Query(expr=f"sum({of('up')})", legend="answer"),
            Query(expr=f"count({of('up')})", legend="known"),
        ),
        width=6,
    ),
    Number(
        title="Workers not scraped",
        tells="They train, and their own metrics are missing here. `ANDON_METRICS_BIND` may be "
        "`off` or loopback (its default), which Prometheus on another host can't reach.",
        see="docs/metrics.md#endpoints",
        queries=(Query(expr=f"clamp_min({_LIVE} - {_SEEN}, 0)"),),
        width=6,
        thresholds=((0, GREEN), (1, YELLOW)),
    ),
    Lanes(
        title="Which endpoint answered",
        tells="A red lane is an endpoint that is listed and does not answer. A lane that ends is "
        "a process that went.",
        see="docs/metrics.md#service-discovery",
        queries=(Query(expr=by_process(of("up")), legend="{{process}}"),),
        width=12,
        states={0: ("silent", RED), 1: ("answers", GREEN)},
    ),
)

_COST = (
    Curve(
        title="How long a scrape takes",
        tells="Near the scrape interval, Prometheus loses samples: the host is overloaded, or the "
        "interval is too short.",
        see="docs/metrics.md#endpoints",
        queries=(Query(expr=by_process(of("scrape_duration_seconds")), legend="{{process}}"),),
        width=12,
        unit="s",
    ),
    Curve(
        title="Samples of a scrape",
        tells="How much Prometheus stores for each process. It does not grow with the run's "
        "length: labels come from closed sets.",
        see="docs/metrics.md",
        queries=(Query(expr=by_process(of("scrape_samples_scraped")), legend="{{process}}"),),
        width=12,
    ),
)

ROW = Row(title="Scrape health", panels=((6, _NOW), (7, _COST)), collapsed=True)
