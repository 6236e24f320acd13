"""Do the reducers keep up?"""

from __future__ import annotations

from andon_grafana.panels import GREEN, ORANGE, RED, Amounts, Curve, Number, Query, Row
from andon_grafana.promql import (
    NOT_OF_WORKERS,
    by_process,
    grown,
    happened,
    latest,
    of,
    rate,
    rate_of,
    total,
)

__all__ = ["ROW"]

_RING = "a ring has no reducer"
# A reducer counts by path and direction.
_BYTES = f"sum by (worker, reducer) ({rate_of('andon_exchange_bytes_total', NOT_OF_WORKERS)})"

_PRESENT = (
    Number(
        title="Reducers",
        tells="How many share the model, how many the line expects, the bulk streams that are "
        "open now, and the connections of their TCP lanes.",
        see="docs/reducers.md",
        queries=(
            Query(expr=latest("andon_reducers"), legend="reducers"),
            Query(expr=latest("andon_reducers_expected"), legend="expected"),
            Query(expr=total("andon_reducer_streams"), legend="streams"),
            Query(expr=total("andon_reducer_lane_connections"), legend="connections"),
        ),
        width=6,
    ),
    Amounts(
        title="Failed rounds, in the time shown",
        tells="Rounds at the reducers that did not finish, by how they ended. Corrupt: a chunk did "
        "not match its checksum. Faulted: a value that must not be averaged. Aborted: a stream "
        "ended. Each is tried again.",
        see="docs/reducers.md#what-happens-when",
        queries=(
            Query(
                expr=happened(
                    "andon_reducer_rounds_total", "outcome", where=('outcome!="finished"',)
                ),
                legend="{{outcome}}",
                color=ORANGE,
            ),
        ),
        empty="none",
        may_be_empty="every round finished",
    ),
    Number(
        title="Bad checksums, in the time shown",
        tells="Rounds in which a reducer found a chunk that did not match its checksum, and "
        "attempts at steps that this voided. Not 0: memory, a network card or a proxy changes "
        "bits; find the worker's host in the service's log.",
        see="docs/protocol-data.md#16-checksums",
        queries=(
            Query(
                expr=grown("andon_reducer_rounds_total", where=('outcome="corrupt"',)),
                legend="rounds",
            ),
            Query(
                expr=grown("andon_step_attempts_total", where=('cause="corrupt"',)),
                legend="attempts",
            ),
        ),
        width=5,
        decimals=0,
        thresholds=((0, GREEN), (0.5, RED)),
        may_be_empty="a ring has no reducer",
    ),
    Number(
        title="Connections of lanes",
        tells="Connections of TCP lanes on which chunks travel now, up and down: one or more for "
        "each stream. 0: chunks go over gRPC or shared memory.",
        see="docs/tcp-lane.md",
        queries=(
            Query(
                expr=total("andon_reducer_lane_connections", "direction"), legend="{{direction}}"
            ),
        ),
        width=5,
        may_be_empty=_RING,
    ),
)

_WORK = (
    Curve(
        title="Reducer rounds a second",
        tells="All but finished were tried again: faulted and corrupt are the network's or a "
        "worker's fault.",
        see="docs/reducers.md#what-happens-when",
        queries=(Query(expr=rate("andon_reducer_rounds_total", "outcome"), legend="{{outcome}}"),),
        width=8,
        unit="suffix:rounds/s",
        may_be_empty=_RING,
    ),
    Curve(
        title="Averaging threads",
        tells="How many threads of a reducer are busy with arithmetic. Near its number of cores: "
        "more reducers help.",
        see="docs/reducers.md#how-fast",
        queries=(
            Query(
                expr=by_process(rate_of("andon_reducer_averaging_seconds_total")),
                legend="{{process}}",
            ),
        ),
        width=8,
        unit="suffix:threads",
        may_be_empty=_RING,
    ),
    Curve(
        title="Bytes that each reducer holds",
        tells="Contributions and averages in its memory now. It falls to 0 between rounds.",
        see="docs/performance.md#memory",
        queries=(Query(expr=by_process(of("andon_inflight_bytes")), legend="{{process}}"),),
        width=8,
        unit="bytes",
        may_be_empty=_RING,
    ),
)

_EACH = (
    Curve(
        title="Bytes of each reducer a second",
        tells="To it and from it, by all paths. Reducers share the model, so they should be alike; "
        "the one with the most limits the others.",
        see="docs/reducers.md",
        queries=(Query(expr=by_process(_BYTES), legend="{{process}}"),),
        unit="Bps",
        may_be_empty=_RING,
    ),
    Curve(
        title="Streams of each reducer",
        tells="Bulk streams that are open now: one for each worker. Fewer: a worker does not reach "
        "this reducer.",
        see="docs/reducers.md#what-happens-when",
        queries=(Query(expr=by_process(of("andon_reducer_streams")), legend="{{process}}"),),
        may_be_empty=_RING,
    ),
    Curve(
        title="Memory of each reducer",
        tells="Resident memory of the service and of separate reducers. It holds the contributions "
        "of a round, and grows with the model and the number of workers.",
        see="docs/performance.md#memory",
        queries=(
            Query(
                expr=by_process(of("process_resident_memory_bytes", NOT_OF_WORKERS)),
                legend="{{process}}",
            ),
        ),
        unit="bytes",
        may_be_empty="only Linux tells a process's memory",
    ),
)

ROW = Row(title="Do the reducers keep up?", panels=((6, _PRESENT), (7, _WORK), (7, _EACH)))
