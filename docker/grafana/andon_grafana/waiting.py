"""Who holds it up?"""

from __future__ import annotations

from andon_grafana.panels import ORANGE, Amounts, Curve, Number, Query, Row
from andon_grafana.phases import PHASES
from andon_grafana.promql import happened, latest, mean_of, quantile, rate, slope

__all__ = ["ROW"]

_WAITS = mean_of("andon_worker_wait_ratio", "worker")
_RUNNING = 'state="running"'
# As `andon top` has it: the worker of whom another waits a twentieth of a step longer.
_LAST = (
    f"bottomk(1, {_WAITS}) and on () (max({_WAITS}) - min({_WAITS}) > 0.05)"
    f" and on () ({latest('andon_line_state', where=(_RUNNING,))} == 1)"
)
_WORKER = "worker {{worker}}"

_CULPRIT = (
    Number(
        title="Holds the line up",
        tells="The worker that waits least, and the part of its steps that it waits. Somebody "
        "else waits more than a twentieth of a step longer. Look at *Where each worker's time "
        "goes*: is it its data, its device or its network? `--shares balanced` or `--schedule "
        "cadence` suit machines of uneven speed.",
        see="docs/runbooks/StragglerPersistent.md",
        queries=(
            Query(
                expr=_LAST,
                legend=_WORKER,
                color=ORANGE,
            ),
        ),
        width=4,
        unit="percentunit",
        names=True,
        empty="nobody",
        may_be_empty="nobody waits",
    ),
    Curve(
        title="Part of the time spent waiting",
        tells="In committed steps, as the workers report. The worker that waits least holds the "
        "others up. Above the dashed line a worker loses almost a third of its time.",
        see="docs/runbooks/StragglerPersistent.md",
        queries=(Query(expr=rate("andon_worker_wait_seconds_sum", "worker"), legend=_WORKER),),
        width=10,
        unit="percentunit",
        thresholds=((0.3, ORANGE),),
    ),
    Curve(
        title="Heartbeat age of each worker",
        tells="A live worker is heard every few seconds at most. If the age grows, its host, its "
        "network or its process is stuck; after its lease the line goes on without it.",
        see="docs/runbooks/WorkerSilent.md",
        queries=(Query(expr=latest("andon_heartbeat_age_seconds", "worker"), legend=_WORKER),),
        width=10,
        unit="s",
        thresholds=((15, ORANGE),),
    ),
)

_TIME = (
    Curve(
        title="Part of the time by activity",
        tells="Computing; waiting for the loader (data); waiting for averages that backward did "
        "not hide; waiting for the commit. The rest is the script's own, such as its optimizer and "
        "evaluation. Much data: more loading processes. Much averages: a slow worker or a thin "
        "network. Choose one worker above to read it.",
        see="docs/performance.md#what-to-set",
        queries=tuple(
            Query(expr=rate(f"{metric}_sum", "worker"), legend=f"{_WORKER}: {phase}")
            for phase, metric in PHASES.items()
        ),
        width=12,
        unit="percentunit",
    ),
    Curve(
        title="Samples of each worker a second",
        tells="How fast a worker computes, and how many samples it gave to committed steps. "
        "Computing much faster than it commits: it waits for somebody.",
        see="docs/guide/uneven-machines.md#divide-the-batch-by-speed",
        queries=(
            Query(
                expr=latest("andon_worker_samples_per_second", "worker"),
                legend=f"{_WORKER}: computes",
            ),
            Query(expr=rate("andon_samples_total", "worker"), legend=f"{_WORKER}: commits"),
        ),
        width=12,
        unit="count:samples/s",
    ),
)

_WORK = (
    Curve(
        title="Share of each worker",
        tells="Its part of the last step's positions. With `--shares equal` all are the same; with "
        "`balanced` they follow the measured speed.",
        see="docs/guide/uneven-machines.md#divide-the-batch-by-speed",
        queries=(Query(expr=latest("andon_worker_share_ratio", "worker"), legend=_WORKER),),
        unit="percentunit",
        stacked=True,
        limits=(0, 1),
    ),
    Curve(
        title="Step time of each worker, p95",
        tells="From a step's assignment to its commit, on the worker. Who is above the others is "
        "slow, or far away.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=(
            Query(expr=quantile(0.95, "andon_worker_step_seconds", "worker"), legend=_WORKER),
        ),
        unit="s",
    ),
    Curve(
        title="Steps of each worker a second",
        tells="All have the same pace. A worker at 0 while the others move gets no commits: look "
        "at its log.",
        see="docs/concepts/steps.md",
        queries=(Query(expr=slope("andon_worker_step", "worker"), legend=_WORKER),),
        unit="suffix:steps/s",
    ),
)

_CADENCE = (
    Curve(
        title="Micro-batches of each worker",
        tells="How many micro-batches a worker was told to make of its share; 0: it was left to "
        "it. With a cadence, fast workers have more.",
        see="docs/guide/uneven-machines.md#let-fast-workers-compute-more-cadence",
        queries=(Query(expr=latest("andon_worker_micro_batches", "worker"), legend=_WORKER),),
        width=6,
    ),
    Curve(
        title="Local steps a second",
        tells="Optimizer steps that a worker makes alone between two exchanges, with "
        "`--schedule local`.",
        see="docs/guide/local-steps.md",
        queries=(Query(expr=rate("andon_local_steps_total", "worker"), legend=_WORKER),),
        width=6,
        unit="suffix:steps/s",
        may_be_empty="the schedule has no local steps",
    ),
    Curve(
        title="Samples of a round",
        tells="Positions of the last round: the global batch, or a longer window. `ahead` is what "
        "the workers compute while the exchange travels. In a round far above the noise scale of "
        "the gradients, a sample brings little.",
        see="docs/guide/uneven-machines.md#what-a-cadence-does-to-training",
        queries=(
            Query(expr=latest("andon_window_samples"), legend="in the round"),
            Query(expr=latest("andon_window_ahead_samples"), legend="ahead"),
            Query(expr=latest("andon_owed_positions"), legend="owed by late workers"),
            Query(expr=latest("andon_late_contributions_total"), legend="late, in all"),
            Query(expr=latest("andon_gradient_noise_scale_samples"), legend="noise scale"),
        ),
        width=6,
        may_be_empty="nobody follows the noise scale, which needs workers' norms",
    ),
    Curve(
        title="Factor of the learning rate",
        tells="1, unless the line scales the learning rate with the size of a round "
        "(`--lr-scaling`).",
        see="docs/guide/uneven-machines.md#what-a-cadence-does-to-training",
        queries=(Query(expr=latest("andon_learning_rate_scale"), legend="factor"),),
        width=6,
    ),
)

_AGAIN = (
    Amounts(
        title="Void rounds, in the time shown",
        tells="By worker: rounds that it began and that were tried again. Many for one worker: "
        "its stream breaks.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(expr=happened("andon_worker_rounds_voided_total", "worker"), legend=_WORKER),
        ),
        width=6,
        empty="none",
        may_be_empty="no round was void",
    ),
    Amounts(
        title="Rejoins, in the time shown",
        tells="Its stream to the coordinator broke, or the service was restarted. Often, for one "
        "worker: its network.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(Query(expr=happened("andon_worker_rejoins_total", "worker"), legend=_WORKER),),
        width=6,
        empty="none",
        may_be_empty="no worker joined again",
    ),
    Amounts(
        title="Slow for long, in the time shown",
        tells="Workers that the line does without because they were slow for long "
        "(`--evict-slower-than`): they follow it and compute nothing, until one is missing. "
        "`andon status` names them, and says how slow they were.",
        see="docs/fault-tolerance.md#slow-for-long",
        queries=(Query(expr=happened("andon_evictions_total"), legend="workers", color=ORANGE),),
        width=6,
        empty="none",
        may_be_empty="no worker was slow for long",
    ),
    Amounts(
        title="Why others waited, in the time shown",
        tells="How often the others waited for a worker long enough to ask it why, by the part of "
        "its work that it was in. `andon why` has the worker, the sentence, and the line of the "
        "script.",
        see="docs/guide/watching.md#why-it-is-slow",
        queries=(
            Query(
                expr=happened("andon_slowness_total", "phase"),
                legend="{{phase}}",
                color=ORANGE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="no worker was late for so long",
    ),
)

ROW = Row(
    title="Who holds it up?",
    panels=((7, _CULPRIT), (8, _TIME), (7, _WORK), (7, _CADENCE), (5, _AGAIN)),
)
