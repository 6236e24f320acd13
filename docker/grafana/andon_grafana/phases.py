"""One worker: does it work, and where does its time go?"""

from __future__ import annotations

from andon_grafana.panels import GREEN, ORANGE, RED, Curve, Lanes, Number, Query, Row
from andon_grafana.promql import OF_WORKER, latest, mean_of, of, quantile, rate
from andon_grafana.quantiles import quantiles

__all__ = ["NOW", "PHASES", "TIME"]

_MINE = (OF_WORKER,)
PHASES = {
    "computing": "andon_compute_seconds",
    "data": "andon_data_wait_seconds",
    "averages": "andon_exchange_wait_seconds",
    "commit": "andon_commit_wait_seconds",
}
"""What takes a worker's time, and the histogram of how long."""
_WAITS = "andon_worker_wait_ratio"

_PRESENT = (
    Number(
        title="Last sign of life",
        tells="Time since the service heard of this worker. It is a few seconds at most; after its "
        "lease the line goes on without it. No data: it is not on the line.",
        see="docs/runbooks/WorkerSilent.md",
        queries=(Query(expr=latest("andon_heartbeat_age_seconds", where=_MINE)),),
        width=4,
        unit="s",
        thresholds=((0, GREEN), (15, ORANGE)),
    ),
    Number(
        title="Step of this worker",
        tells="The step that it committed last, and how many committed steps it has still to make "
        "up: 0 for a worker that trains.",
        see="docs/runbooks/WorkerNotCatchingUp.md",
        queries=(
            Query(expr=latest("andon_worker_step", where=_MINE), legend="step"),
            Query(expr=latest("andon_worker_steps_behind", where=_MINE), legend="behind"),
        ),
        width=4,
    ),
    Number(
        title="Work of this worker",
        tells="Its part of the last step's positions, and how fast it computed them. With "
        "`--shares balanced` the share follows the speed.",
        see="docs/guide/uneven-machines.md#divide-the-batch-by-speed",
        queries=(
            Query(
                expr=latest("andon_worker_share_ratio", where=_MINE),
                legend="share",
                unit="percentunit",
            ),
            Query(
                expr=latest("andon_worker_samples_per_second", where=_MINE),
                legend="computes",
                unit="count:samples/s",
            ),
        ),
        width=5,
    ),
    Number(
        title="Waits of this worker",
        tells="The part of its last step that it waited for averages. Near 0 while others wait: "
        "this worker holds them up. Much: another one does.",
        see="docs/runbooks/StragglerPersistent.md",
        queries=(Query(expr=latest(_WAITS, where=_MINE)),),
        width=3,
        unit="percentunit",
    ),
    Lanes(
        title="When this worker answered",
        tells="Whether its metrics endpoint answered Prometheus. A hole is a time in which it was "
        "not on the line.",
        see="docs/metrics.md#service-discovery",
        queries=(Query(expr=latest("up", where=_MINE), legend="endpoint"),),
        width=8,
        states={0: ("silent", RED), 1: ("answers", GREEN)},
    ),
)

_TIME = (
    Curve(
        title="Phases, part of the time",
        tells="Computing; standing still for data; for averages that backward did not hide; for "
        "the commit. What is missing to 100 % is the script's own: its optimizer, its evaluation, "
        "its hooks.",
        see="docs/performance.md#what-to-set",
        queries=tuple(
            Query(expr=rate(f"{metric}_sum", where=_MINE), legend=name)
            for name, metric in PHASES.items()
        ),
        width=12,
        unit="percentunit",
        stacked=True,
    ),
    Curve(
        title="Phases of a step, p95",
        tells="How long each phase of a step takes at worst. A phase whose p95 is far above its "
        "part of the time is one that stalls now and then.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=tuple(
            Query(expr=quantile(0.95, metric, where=_MINE), legend=name)
            for name, metric in PHASES.items()
        ),
        width=12,
        unit="s",
    ),
)

_OTHERS = (
    Curve(
        title="Waits against the others",
        tells="The part of each step that this worker waited, between the least and the most that "
        "a worker of the run did. At the lower edge: the others wait for this one.",
        see="docs/runbooks/StragglerPersistent.md",
        queries=(
            Query(expr=f"max({mean_of(_WAITS, 'worker')})", legend="this worker", color=ORANGE),
            Query(expr=f"min({of(_WAITS)})", legend="least"),
            Query(expr=f"max({of(_WAITS)})", legend="most"),
        ),
        unit="percentunit",
        limits=(0, 1),
    ),
    Curve(
        title="Speed against the others",
        tells="Samples that this worker computes in a second, and the mean of all workers. Far "
        "below the mean with an equal share: it holds the others up.",
        see="docs/guide/uneven-machines.md#divide-the-batch-by-speed",
        queries=(
            Query(
                expr=latest("andon_worker_samples_per_second", where=_MINE),
                legend="this worker",
                color=ORANGE,
            ),
            Query(expr=f"avg({of('andon_worker_samples_per_second')})", legend="mean of all"),
        ),
        unit="count:samples/s",
    ),
    Curve(
        title="Its committed samples a second",
        tells="Samples that it gave to committed steps. 0 while the line moves: it gets no share, "
        "or no commits.",
        see="docs/concepts/steps.md",
        queries=(Query(expr=rate("andon_samples_total", where=_MINE), legend="samples"),),
        unit="count:samples/s",
    ),
)

_STEP = (
    Curve(
        title="Its step: p50, p95, p99",
        tells="From a step's assignment to its commit, on this worker. A point is an exemplar: it "
        "names the step.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=quantiles("andon_worker_step_seconds", exemplars=True, where=_MINE),
        unit="s",
    ),
    Curve(
        title="Its share over time",
        tells="Its part of the positions of each step. It falls when the line finds the worker "
        "slower than the others.",
        see="docs/guide/uneven-machines.md#divide-the-batch-by-speed",
        queries=(Query(expr=latest("andon_worker_share_ratio", where=_MINE), legend="share"),),
        unit="percentunit",
        limits=(0, 1),
    ),
    Curve(
        title="How late it may be",
        tells="Its silence, and the time that it may be silent while a round waits for it. Where "
        "they meet, the line goes on without it.",
        see="docs/fault-tolerance.md#slow-workers-and-workers-that-do-not-come",
        queries=(
            Query(expr=latest("andon_heartbeat_age_seconds", where=_MINE), legend="silence"),
            Query(expr=latest("andon_worker_patience_seconds", where=_MINE), legend="patience"),
        ),
        unit="s",
    ),
)

NOW = Row(title="Does it work?", panels=((5, _PRESENT),))
TIME = Row(title="Where does its time go?", panels=((9, _TIME), (7, _OTHERS), (7, _STEP)))
