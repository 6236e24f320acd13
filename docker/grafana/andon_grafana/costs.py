"""What does it cost?"""

from __future__ import annotations

from andon_grafana.panels import GREEN, ORANGE, Amounts, Curve, Facts, Number, Query, Row
from andon_grafana.promql import by_process, grown, happened, latest, mean, of, rate_of, total
from andon_grafana.quantiles import quantiles

__all__ = ["ROW"]

_WORKER = "worker {{worker}}"

_STEP = (
    Curve(
        title="Step: p50, p95, p99",
        tells="From a step's last assignment to its commit. A point is an exemplar: it names the "
        "step.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=quantiles("andon_step_seconds", exemplars=True),
        width=12,
        unit="s",
    ),
    Curve(
        title="Journal write: p50, p95, p99",
        tells="How long the journal takes to make a record durable. Every commit waits for it. "
        "Slow: the disk is busy, or the run's folder is on a network.",
        see="docs/runbooks/JournalSlow.md",
        queries=quantiles("andon_journal_write_seconds"),
        width=12,
        unit="s",
        thresholds=((0.05, ORANGE),),
    ),
)

_TROUBLE = (
    Amounts(
        title="Repeated attempts, in the time shown",
        tells="By what voided the attempt before. Each one is a step that was computed again.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(
                expr=happened("andon_step_attempts_total", "cause", where=('cause!="first"',)),
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

_KEPT = (
    Number(
        title="Machine hours and cost",
        tells="The time that the workers' machines were on the line, all together, and what it "
        "cost at the price of --price-per-hour.",
        see="docs/places/spot.md#what-it-costs",
        queries=(
            Query(expr=f"{total('andon_machine_seconds_total')} / 3600", legend="hours"),
            Query(expr=total("andon_cost_total"), legend="cost"),
        ),
        width=6,
        decimals=2,
        may_be_empty="the run has no price",
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
        width=10,
        decimals=0,
        may_be_empty="there is no checkpoint yet",
    ),
    Facts(
        title="Versions",
        tells="The versions of Andon that run, and how many processes have each. Two at once are "
        "allowed, and worth knowing.",
        see="docs/metrics.md#the-line-and-its-steps",
        queries=(
            Query(expr=f"count by (version) ({of('andon_build_info')})", legend="{{version}}"),
        ),
        width=8,
        hidden=("Time",),
    ),
)

ROW = Row(
    title="What does it cost?",
    panels=((8, _STEP), (6, _TROUBLE), (7, _MACHINES), (5, _KEPT)),
    collapsed=True,
)
