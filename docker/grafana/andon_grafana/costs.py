"""What does it cost?"""

from __future__ import annotations

from andon_grafana.panels import (
    BLUE,
    GREEN,
    ORANGE,
    YELLOW,
    Amounts,
    Curve,
    Facts,
    Lanes,
    Number,
    Query,
    Row,
)
from andon_grafana.promql import (
    by_process,
    code,
    grown,
    latest,
    mean,
    of,
    quantile,
    rate,
    rate_of,
    total,
)

__all__ = ["PATHS", "ROW"]

PATHS = {
    "shared-memory": (1, "shared memory", GREEN),
    "ring": (2, "ring", BLUE),
    "wire": (3, "wire", YELLOW),
    "tcp": (4, "TCP lanes", BLUE),
}
"""The number, text and colour of each path of an exchange."""

_WORKER = "worker {{worker}}"
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def _quantiles(histogram: str, *, exemplars: bool = False) -> tuple[Query, ...]:
    """The median, the 95th and the 99th percentile; exemplars with the last."""
    return tuple(
        Query(expr=quantile(part, histogram), legend=name, exemplars=exemplars and name == "p99")
        for name, part in _QUANTILES.items()
    )


_EXCHANGE = (
    Curve(
        title="All-reduce: p50, p95, p99",
        tells="From an exchange's first contribution to its last average. Far above its usual: "
        "a slow worker, a busy network, or shared memory that was lost. A point is an exemplar: it "
        "names the step.",
        see="docs/metrics.md#the-exchange",
        queries=_quantiles("andon_allreduce_seconds", exemplars=True),
        width=6,
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
        width=6,
        unit="s",
        may_be_empty="this Prometheus does not evaluate the recording rules",
    ),
    Curve(
        title="Step: p50, p95, p99",
        tells="From a step's last assignment to its commit. A point is an exemplar: it names the "
        "step.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=_quantiles("andon_step_seconds", exemplars=True),
        width=6,
        unit="s",
    ),
    Curve(
        title="Bytes exchanged a second",
        tells="Chunks and state, from workers (up) and to them (down), as the reducers count "
        "them; the ring as the workers count it. Workers on the reducer's host should use shared "
        "memory.",
        see="docs/shared-memory.md",
        queries=(
            Query(
                expr=rate("andon_exchange_bytes_total", "direction", "path", where=('worker=""',)),
                legend="{{path}}, {{direction}}",
            ),
            Query(
                expr=rate("andon_exchange_bytes_total", "direction", where=('path="ring"',)),
                legend="ring, {{direction}}",
            ),
        ),
        width=6,
        unit="Bps",
    ),
)

_HIDING = (
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
        states={number: (text, color) for number, text, color in PATHS.values()},
        may_be_empty="no worker exchanged anything yet",
    ),
)

_TROUBLE = (
    Amounts(
        title="Repeated attempts, in the time shown",
        tells="By what voided the attempt before. Each one is a step that was computed again.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(
                expr=grown("andon_step_attempts_total", "cause", where=('cause!="first"',))
                + " > 0",
                legend="{{cause}}",
                color=ORANGE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="every step passed at its first attempt",
    ),
    Number(
        title="Recoveries, in the time shown",
        tells="From the loss that voided a round to the next commit: how many, their mean, and "
        "the time that they took together. Halts do not count.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(expr=f"round({grown('andon_recovery_seconds_count')})", legend="recoveries"),
            Query(expr=mean("andon_recovery_seconds"), legend="mean", unit="s"),
            Query(expr=grown("andon_recovery_seconds_sum"), legend="together", unit="s"),
        ),
        width=6,
        may_be_empty="nothing was lost: then there is no mean",
    ),
    Number(
        title="Pauses, in the time shown",
        tells="How long the line stood still while newcomers got the weights: how many times, the "
        "mean, and the time together. Large models travel long: a checkpoint on the newcomer's "
        "host does not help, a faster network does.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(expr=f"round({grown('andon_join_pause_seconds_count')})", legend="pauses"),
            Query(expr=mean("andon_join_pause_seconds"), legend="mean", unit="s"),
            Query(expr=grown("andon_join_pause_seconds_sum"), legend="together", unit="s"),
        ),
        width=6,
        may_be_empty="nobody came: then there is no mean",
    ),
    Number(
        title="Setbacks, in the time shown",
        tells="Steps whose scaled gradients overflowed: they moved no weight. Workers on the "
        "reducer's host that fell back to the wire. Transfers of state that failed. Checkpoints "
        "that were due and missed.",
        see="docs/metrics.md",
        queries=(
            Query(expr=grown("andon_steps_overflowed_total"), legend="overflows"),
            Query(expr=grown("andon_shared_memory_fallbacks_total"), legend="fallbacks"),
            Query(expr=grown("andon_state_transfer_failures_total"), legend="transfers"),
            Query(expr=grown("andon_checkpoints_missed_total"), legend="checkpoints"),
        ),
        width=6,
        decimals=0,
        thresholds=((0, GREEN), (0.5, ORANGE)),
    ),
)

_REDUCERS = (
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
        width=4,
    ),
    Curve(
        title="Reducer rounds a second",
        tells="All but finished were tried again: faulted and corrupt are the network's or a "
        "worker's fault.",
        see="docs/reducers.md#what-happens-when",
        queries=(Query(expr=rate("andon_reducer_rounds_total", "outcome"), legend="{{outcome}}"),),
        width=5,
        unit="suffix:rounds/s",
        may_be_empty="a ring has no reducer",
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
        width=5,
        unit="suffix:threads",
        may_be_empty="a ring has no reducer",
    ),
    Curve(
        title="Bytes that each reducer holds",
        tells="Contributions and averages in its memory now. It falls to 0 between rounds.",
        see="docs/performance.md#memory",
        queries=(Query(expr=by_process(of("andon_inflight_bytes")), legend="{{process}}"),),
        width=5,
        unit="bytes",
        may_be_empty="a ring has no reducer",
    ),
    Curve(
        title="State to newcomers, bytes a second",
        tells="Weights and the rest of the state, on their way to workers that joined.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(Query(expr=rate("andon_state_transfer_bytes_total"), legend="state"),),
        width=5,
        unit="Bps",
    ),
)

_SAFETY = (
    Curve(
        title="Journal write: p50, p95, p99",
        tells="How long the journal takes to make a record durable. Every commit waits for it. "
        "Slow: the disk is busy, or the run's folder is on a network.",
        see="docs/runbooks/JournalSlow.md",
        queries=_quantiles("andon_journal_write_seconds"),
        width=12,
        unit="s",
        thresholds=((0.05, ORANGE),),
    ),
    Number(
        title="Last checkpoint",
        tells="Its step, how many steps are not in it, how often one is due, and its age. "
        "If all workers end at once, the steps that are not in it are lost.",
        see="docs/runbooks/CheckpointStale.md",
        queries=(
            Query(expr=latest("andon_checkpoint_step"), legend="step"),
            Query(
                expr=f"{latest('andon_step')} - {latest('andon_checkpoint_step')}",
                legend="steps since",
            ),
            Query(expr=latest("andon_checkpoint_interval_steps"), legend="due every"),
            Query(
                expr=f"time() - {latest('andon_checkpoint_timestamp_seconds')}",
                legend="age",
                unit="s",
            ),
        ),
        width=12,
        decimals=0,
        may_be_empty="there is no checkpoint yet",
    ),
)

_MACHINES = (
    Curve(
        title="Memory of each process",
        tells="Resident memory. One that only grows is a leak: of the script, if it is a worker.",
        see="docs/performance.md#memory",
        queries=(
            Query(expr=by_process(of("process_resident_memory_bytes")), legend="{{process}}"),
        ),
        width=6,
        unit="bytes",
        may_be_empty="only Linux tells a process's memory",
    ),
    Curve(
        title="CPU cores of each process",
        tells="1 is a whole core. A service that uses a whole core holds the line up.",
        see="docs/performance.md#what-to-set",
        queries=(
            Query(
                expr=by_process(rate_of("process_cpu_seconds_total")),
                legend="{{process}}",
            ),
        ),
        width=6,
        unit="suffix:cores",
        may_be_empty="only Linux tells a process's time",
    ),
    Curve(
        title="GPU utilization",
        tells="By worker. Low, with much data wait: the loader is too slow.",
        see="docs/performance.md#what-to-set",
        queries=(Query(expr=latest("andon_gpu_utilization_ratio", "worker"), legend=_WORKER),),
        width=6,
        unit="percentunit",
        limits=(0, 1),
        may_be_empty="there is no GPU, or no NVML",
    ),
    Curve(
        title="GPU memory of each worker",
        tells="By kind. Near the device's size, the next larger batch ends the worker.",
        see="docs/performance.md#memory",
        queries=(
            Query(
                expr=latest("andon_gpu_memory_bytes", "worker", "kind"),
                legend=f"{_WORKER}: {{{{kind}}}}",
            ),
        ),
        width=6,
        unit="bytes",
        may_be_empty="there is no GPU",
    ),
)

_VERSIONS = (
    Facts(
        title="Versions",
        tells="The versions of Andon that run, and how many processes have each. Two at once are "
        "allowed, and worth knowing.",
        see="docs/metrics.md#the-line-and-its-steps",
        queries=(
            Query(expr=f"count by (version) ({of('andon_build_info')})", legend="{{version}}"),
        ),
        width=12,
        hidden=("Time",),
    ),
    Curve(
        title="TLS handshakes begun a second",
        tells="By clients, whether they succeeded or not. Many without new workers: somebody "
        "tries again and again, with a certificate that is refused.",
        see="docs/security.md#what-an-error-means",
        queries=(Query(expr=rate("andon_tls_handshakes_total"), legend="handshakes"),),
        width=12,
        unit="suffix:handshakes/s",
    ),
)

ROW = Row(
    title="What does it cost?",
    panels=(
        (8, _EXCHANGE),
        (7, _HIDING),
        (6, _TROUBLE),
        (7, _REDUCERS),
        (7, _SAFETY),
        (7, _MACHINES),
        (5, _VERSIONS),
    ),
    collapsed=True,
)
