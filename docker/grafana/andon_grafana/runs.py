"""All runs: which of them train, and which wait for a person?"""

from __future__ import annotations

from andon_grafana.panels import (
    GREEN,
    ORANGE,
    RED,
    Amounts,
    Column,
    Curve,
    Facts,
    Lanes,
    Number,
    Query,
    Row,
    Table,
)
from andon_grafana.promql import code, happened, latest, of, rate, total
from andon_grafana.running import SHOWN, STATES

__all__ = ["HISTORY", "NOW"]

_RUN = "{{run}}"
_STATE = code("andon_line_state", "state", {name: each[0] for name, each in STATES.items()}, "run")
_LIVE = latest("andon_workers", "run", where=('state="live"',))
_EXPECTED = latest("andon_workers_expected", "run")
_SAMPLES = rate("andon_samples_committed_total", "run")
_FIRING = 'alertstate="firing"'
# When a run was last seen halted. A halt that came before the first scrape increases no counter, so
# it is asked of the state, as often as the marks ask: a halt of less than 15 s may be missed.
_HALTED = f"{of('andon_halted', by=('run',))} == 1"
_LAST_HALT = f"1000 * max by (run) (max_over_time(timestamp({_HALTED})[$__range:15s]))"


def _in_state(state: str) -> str:
    """How many runs are in a state."""
    where = f'state="{state}"'
    return f"sum({latest('andon_line_state', 'run', where=(where,))})"


_COUNTS = (
    Number(
        title="Runs that train",
        tells="How many of the runs that Prometheus scraped lately are in the state RUNNING.",
        see="docs/concepts/line.md",
        queries=(Query(expr=_in_state("running"), color=GREEN),),
        width=4,
    ),
    Number(
        title="Runs that wait for a person",
        tells="Runs that are halted: no weight moves until somebody answers. The table says which "
        "they are, and a click leads to the run with the reason.",
        see="docs/runbooks/LineHalted.md",
        queries=(Query(expr=_in_state("halted")),),
        width=4,
        thresholds=((0, GREEN), (1, RED)),
    ),
    Number(
        title="Workers of all runs",
        tells="Workers that are live, and those that their lines expect. Below what is expected: "
        "the table says in which run.",
        see="docs/runbooks/WorkersBelowExpected.md",
        queries=(
            Query(expr=f"sum({_LIVE})", legend="live"),
            Query(expr=f"sum({_EXPECTED})", legend="expected"),
        ),
        width=5,
    ),
    Number(
        title="Samples of all runs a second",
        tells="Samples in committed steps, of all runs together: what the machines are worth.",
        see="docs/performance.md#what-to-expect",
        queries=(Query(expr=f"sum({_SAMPLES})"),),
        width=5,
        unit="count:samples/s",
    ),
    Number(
        title="Alerts of all runs",
        tells="Alerts that fire, by run and name. Each has a page that says what to do. They need "
        "the rules of docker/prometheus/alerts.yml.",
        see="docs/runbooks/README.md",
        queries=(
            Query(
                expr=latest("ALERTS", "run", "alertname", where=(_FIRING,)),
                legend="{{run}}: {{alertname}}",
                color=RED,
            ),
        ),
        width=6,
        names=True,
        states={1: ("FIRES", RED)},
        empty="none",
        may_be_empty="no alert fires",
    ),
)

_ALL = Table(
    title="Runs",
    tells="A row for each run that Prometheus scraped in the time shown. Click on a row for the "
    "run's own dashboard. No state: the run's service does not answer, or it has ended.",
    see="docs/metrics.md#the-run-and-its-line",
    key="run",
    queries=(
        Column(expr=_STATE, legend="state", states=SHOWN),
        Column(expr=latest("andon_step", "run"), legend="step"),
        Column(expr=latest("andon_steps_planned", "run"), legend="planned"),
        Column(expr=latest("andon_step_loss", "run"), legend="loss", decimals=4),
        Column(expr=_LIVE, legend="live"),
        Column(expr=_EXPECTED, legend="expected"),
        Column(expr=_SAMPLES, legend="samples a second", unit="count:samples/s"),
        Column(expr=total("andon_jidoka_halts_total", "run"), legend="halts"),
        Column(expr=_LAST_HALT, legend="last halt, in the time shown", unit="dateTimeFromNow"),
        Column(expr=total("andon_spikes_total", "run"), legend="spikes"),
        Column(expr=total("andon_machine_seconds_total", "run"), legend="machine time", unit="s"),
        Column(expr=total("andon_cost_total", "run"), legend="cost", decimals=2),
    ),
    width=24,
    may_be_empty="a run has no loss before its first step, and perhaps neither end nor halt",
)

_TROUBLE = (
    Facts(
        title="Why runs are halted",
        tells="Runs that are halted now, and the reason; `operator` is a person's halt. Nothing: "
        "no run is halted.",
        see="docs/guide/halts.md#answer-it",
        queries=(
            Query(
                expr=f"{latest('andon_halted', 'run', 'reason')} == 1", legend="{{run}}: {{reason}}"
            ),
        ),
        may_be_empty="no run is halted",
    ),
    Amounts(
        title="Halts by run, in the time shown",
        tells="How often each line stopped, by itself or by a person. A run far above the others "
        "has bad data, or a learning rate that is too high.",
        see="docs/guide/halts.md",
        queries=(Query(expr=happened("andon_jidoka_halts_total", "run"), legend=_RUN, color=RED),),
        empty="none",
        may_be_empty="no run halted",
    ),
    Amounts(
        title="Losses by run, in the time shown",
        tells="Workers that were lost, and nobody knows why. Many in one run: look at its hosts.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(
                expr=happened("andon_departures_total", "run", where=('reason="lost"',)),
                legend=_RUN,
                color=ORANGE,
            ),
        ),
        empty="none",
        may_be_empty="no worker was lost",
    ),
)

_STATES = (
    Lanes(
        title="State of each run",
        tells="A lane for each run: red is time that waited for a person. A lane that ends is a "
        "run that ended, or a service that does not answer.",
        see="docs/concepts/line.md",
        queries=(Query(expr=_STATE, legend=_RUN),),
        width=24,
        states=SHOWN,
    ),
)

_CURVES = (
    Curve(
        title="Loss of each run",
        tells="The loss of committed steps. Runs compare only if their models and data do.",
        see="docs/guide/losses.md",
        queries=(Query(expr=latest("andon_step_loss", "run"), legend=_RUN),),
        may_be_empty="there is no loss before the first step",
    ),
    Curve(
        title="Samples of each run a second",
        tells="Samples in committed steps. A run that falls to 0 is halted, or waits for workers.",
        see="docs/performance.md#what-to-expect",
        queries=(Query(expr=_SAMPLES, legend=_RUN),),
        unit="count:samples/s",
    ),
    Curve(
        title="Workers of each run",
        tells="Live workers. A step down is a worker that was lost or left; the others go on.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(Query(expr=_LIVE, legend=_RUN),),
    ),
)

NOW = Row(title="Which runs train?", panels=((4, _COUNTS), (9, (_ALL,)), (6, _TROUBLE)))
HISTORY = Row(title="What did they do?", panels=((6, _STATES), (8, _CURVES)))
