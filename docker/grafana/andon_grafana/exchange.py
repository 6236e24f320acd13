"""Which way do gradients go, and how long does it take?"""

from __future__ import annotations

from andon_grafana.panels import BLUE, GREEN, YELLOW, Amounts, Curve, Lanes, Query, Row
from andon_grafana.promql import (
    NOT_OF_WORKERS,
    OF_WORKER,
    OF_WORKERS,
    code,
    happened,
    latest,
    of,
    quantile,
    rate,
    rate_of,
)
from andon_grafana.quantiles import quantiles

__all__ = ["PATHS", "TIME", "WAYS"]

PATHS = {
    "shared-memory": (1, "shared memory", GREEN),
    "ring": (2, "ring", BLUE),
    "wire": (3, "wire", YELLOW),
    "tcp": (4, "TCP lanes", BLUE),
}
"""The number, text and colour of each path of an exchange."""

_WORKER = "worker {{worker}}"
_BYTES = "andon_exchange_bytes_total"
# Of each worker, for each path that its last exchange took.
_MEAN = (
    f"{rate_of('andon_exchange_seconds_sum', OF_WORKER)}"
    f" / ({rate_of('andon_exchange_seconds_count', OF_WORKER)} > 0)"
)
_BY_PATH = (
    f"avg by (path) (({of('andon_exchange_path', OF_WORKER)} == 1)"
    f" * on (instance, worker) group_left () ({_MEAN}))"
)

_BY_WAY = (
    Curve(
        title="Bytes exchanged a second",
        tells="Chunks and state, from workers (up) and to them (down), as the reducers count "
        "them; the ring as the workers count it. Workers on the reducer's host should use shared "
        "memory.",
        see="docs/shared-memory.md",
        queries=(
            Query(
                expr=rate(
                    "andon_exchange_bytes_total", "direction", "path", where=(NOT_OF_WORKERS,)
                ),
                legend="{{path}}, {{direction}}",
            ),
            Query(
                expr=rate("andon_exchange_bytes_total", "direction", where=('path="ring"',)),
                legend="ring, {{direction}}",
            ),
        ),
        width=8,
        unit="Bps",
    ),
    Curve(
        title="Bytes of each worker a second",
        tells="Up and down, by all paths. Workers with equal shares of the model's reducers send "
        "alike; one with fewer bytes has other rounds, or none.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=(
            Query(expr=rate(_BYTES, "worker", "direction"), legend=f"{_WORKER}, {{{{direction}}}}"),
        ),
        unit="Bps",
    ),
    Amounts(
        title="Bytes by path, in the time shown",
        tells="What all workers sent and received, by the path that it took. Bytes on the wire "
        "between a worker and a reducer of one host could go through shared memory.",
        see="docs/shared-memory.md",
        queries=(
            Query(
                expr=happened(_BYTES, "path", where=(OF_WORKERS,)),
                legend="{{path}}",
            ),
        ),
        unit="bytes",
    ),
)

_PATHS_TAKEN = (
    Lanes(
        title="Path of each worker's exchange",
        tells="The slowest path that its last exchange took. A worker on the reducer's host that "
        "turns from shared memory to the wire lost it: `/dev/shm` is too small, or its container "
        "has one of its own.",
        see="docs/runbooks/SharedMemoryLost.md",
        queries=(
            Query(
                expr=code(
                    "andon_exchange_path",
                    "path",
                    {name: each[0] for name, each in PATHS.items()},
                    "worker",
                ),
                legend=_WORKER,
            ),
        ),
        width=16,
        states={number: (text, color) for number, text, color in PATHS.values()},
        may_be_empty="no worker exchanged anything yet",
    ),
    Curve(
        title="Mean exchange by path",
        tells="Of the workers whose last exchange took a path, the mean time from a step's first "
        "block sent to its last average. The paths of one run wait for the same reducers: what "
        "differs is the way.",
        see="docs/tcp-lane.md",
        queries=(Query(expr=_BY_PATH, legend="{{path}}"),),
        unit="s",
        may_be_empty="no worker exchanged anything lately",
    ),
)

_ALL = (
    Curve(
        title="All-reduce: p50, p95, p99",
        tells="From an exchange's first contribution to its last average. Far above its usual: "
        "a slow worker, a busy network, or shared memory that was lost. A point is an exemplar: it "
        "names the step.",
        see="docs/metrics.md#the-exchange",
        queries=quantiles("andon_allreduce_seconds", exemplars=True),
        width=12,
        unit="s",
    ),
    Curve(
        title="All-reduce against its usual",
        tells="The mean of five minutes, and its median of the last six hours. Twice the usual "
        "raises an alert. They are recorded by docker/prometheus/alerts.yml.",
        see="docs/runbooks/AllreduceSlow.md",
        queries=(
            Query(expr=latest("run:andon_allreduce_seconds:mean5m"), legend="five minutes"),
            Query(expr=latest("run:andon_allreduce_seconds:usual6h"), legend="usual"),
        ),
        width=12,
        unit="s",
        may_be_empty="this Prometheus does not evaluate the recording rules",
    ),
)

_EACH = (
    Curve(
        title="Exchange hidden by backward",
        tells="Of each worker's last exchange. Low: what is not hidden is waited for. Larger "
        "micro-batches, a thinner encoding or fewer exchanges help.",
        see="docs/performance.md#what-to-set",
        queries=(Query(expr=latest("andon_exchange_hidden_ratio", "worker"), legend=_WORKER),),
        unit="percentunit",
        limits=(0, 1),
    ),
    Curve(
        title="Exchange of each worker, p95",
        tells="From a step's first block sent to its last average received. One worker far above "
        "the others has the slow network.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=(Query(expr=quantile(0.95, "andon_exchange_seconds", "worker"), legend=_WORKER),),
        unit="s",
    ),
    Curve(
        title="Wait for averages, p95",
        tells="Of each worker: the part of its exchange that backward does not hide. Long for all "
        "but one: that one is late. Long for all: the network, or the reducers.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=(
            Query(expr=quantile(0.95, "andon_exchange_wait_seconds", "worker"), legend=_WORKER),
        ),
        unit="s",
    ),
)

WAYS = Row(title="Which way do gradients go?", panels=((8, _BY_WAY), (7, _PATHS_TAKEN)))
TIME = Row(title="How long does an exchange take?", panels=((8, _ALL), (7, _EACH)))
