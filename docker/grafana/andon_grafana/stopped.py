"""Why did it stop?"""

from __future__ import annotations

from andon_grafana.panels import BLUE, GREEN, ORANGE, RED, Amounts, Curve, Lanes, Number, Query, Row
from andon_grafana.promql import grown, happened, latest, mean

__all__ = ["OWN", "PERSON", "ROW"]

OWN, PERSON = 'reason!="operator"', 'reason="operator"'
"""The line stopped itself; somebody stopped it with `andon halt`."""

_BY_ITSELF = f"{latest('andon_halted', 'reason', where=(OWN,))} == 1"
_BY_SOMEBODY = f"2 * ({latest('andon_halted', where=(PERSON,))} == 1)"
_HALTED = {1: ("HALTED", RED), 2: ("HALTED", BLUE)}
_FIRING = 'alertstate="firing"'

_PRESENT = (
    Number(
        title="Halted now, because of",
        tells="The reason of the present halt. Red: the line stopped itself. Blue: somebody ran "
        "`andon halt`. `andon status` shows where the value was, and the answers: `andon resume`, "
        "`andon resume --skip`, `andon resume --drop WORKER`.",
        see="docs/guide/halts.md#answer-it",
        queries=(
            Query(expr=_BY_ITSELF, legend="{{reason}}"),
            Query(expr=_BY_SOMEBODY, legend="operator"),
        ),
        width=6,
        names=True,
        states=_HALTED,
        empty="not halted",
        may_be_empty="the line is not halted",
    ),
    Number(
        title="Alerts that fire",
        tells="Of this run, by name. Each has a page that says what to do. They need the rules of "
        "docker/prometheus/alerts.yml.",
        see="docs/runbooks/README.md",
        queries=(
            Query(
                expr=latest("ALERTS", "alertname", where=(_FIRING,)),
                legend="{{alertname}}",
                color=RED,
            ),
        ),
        width=6,
        names=True,
        states={1: ("FIRES", RED)},
        empty="none",
        may_be_empty="no alert fires",
    ),
    Amounts(
        title="Halts since the run began",
        tells="How often the line stopped itself, by reason (red), and how often somebody stopped "
        "it (blue). The journal keeps these counts over restarts of the service. The page has "
        "every reason, and what to look for.",
        see="docs/guide/halts.md#what-else-stops-the-line",
        queries=(
            Query(
                expr=f"{latest('andon_jidoka_halts_total', 'reason', where=(OWN,))} > 0",
                legend="{{reason}}",
                color=RED,
            ),
            Query(
                expr=f"{latest('andon_jidoka_halts_total', where=(PERSON,))} > 0",
                legend="operator",
                color=BLUE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="the line never halted",
    ),
    Amounts(
        title="Answers since the run began",
        tells="What people answered: retry tries the step again, skip leaves its samples out, drop "
        "goes on without a worker.",
        see="docs/guide/halts.md#answer-it",
        queries=(
            Query(
                expr=f"{latest('andon_halt_answers_total', 'answer')} > 0",
                legend="{{answer}}",
                color=GREEN,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="nobody answered a halt",
    ),
)

_TIMES = (
    Lanes(
        title="When it was halted",
        tells="The time that the line was halted, by reason. The same times are marked in every "
        "curve of this dashboard: red, the line's own; blue, a person's.",
        see="docs/guide/halts.md",
        queries=(
            Query(expr=_BY_ITSELF, legend="{{reason}}"),
            Query(expr=_BY_SOMEBODY, legend="operator"),
        ),
        width=24,
        empty="not halted",
        states=_HALTED,
        may_be_empty="the line is not halted",
    ),
)

_EVENTS = (
    Amounts(
        title="Departures, in the time shown",
        tells="By reason. `lost` was not expected: look at that worker's host and log. A worker "
        "that was `dropped` was left out by the answer to a halt.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(
                expr=happened("andon_departures_total", "reason"),
                legend="{{reason}}",
                color=ORANGE,
            ),
        ),
        width=5,
        empty="none",
        may_be_empty="no worker went",
    ),
    Amounts(
        title="Arrivals, in the time shown",
        tells="By how far they were. A worker whose stream broke joins again: many of those mean "
        "a bad network or an overloaded host.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(Query(expr=happened("andon_joins_total", "status"), legend="{{status}}"),),
        width=5,
        empty="none",
        may_be_empty="no worker came",
    ),
    Amounts(
        title="Reported faults, in the time shown",
        tells="By kind. A fault voids the round, and the step is tried again; several workers may "
        "report the same one. The service's log names the worker.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(expr=happened("andon_faults_total", "kind"), legend="{{kind}}", color=ORANGE),
        ),
        width=5,
        empty="none",
        may_be_empty="no worker reported a fault",
    ),
    Amounts(
        title="Refused calls, in the time shown",
        tells="Calls that a service ended with an error, by its reason. Each reason has a page "
        "that says whose mistake it is and what to do.",
        see="docs/errors/README.md",
        queries=(
            Query(
                expr=happened("andon_refusals_total", "service", "reason"),
                legend="{{service}}: {{reason}}",
                color=ORANGE,
            ),
        ),
        width=5,
        empty="none",
        may_be_empty="no call was refused",
    ),
    Amounts(
        title="Notices, in the time shown",
        tells="Workers that said that their machine was about to go. Each leaves in order, "
        "after what it computes now, and no sample is computed again.",
        see="docs/places/spot.md",
        queries=(Query(expr=happened("andon_notices_total"), legend="workers", color=BLUE),),
        width=4,
        empty="none",
        may_be_empty="no machine was about to go",
    ),
)

_LEARNING = (
    Curve(
        title="Steps behind the line",
        tells="Of each worker that is behind. It learns the line's state while the others train, "
        "or waits for a transfer. The curve should fall to 0.",
        see="docs/runbooks/WorkerNotCatchingUp.md",
        queries=(
            Query(
                expr=f"{latest('andon_worker_steps_behind', 'worker')} > 0",
                legend="worker {{worker}}",
            ),
        ),
        width=12,
        may_be_empty="no worker is behind",
    ),
    Amounts(
        title="State learnt, in the time shown",
        tells="Workers that got the line's state while it trained, how long that took, and how "
        "long rounds waited for them.",
        see="docs/concepts/membership.md#a-worker-that-joins-while-the-line-trains",
        queries=(
            Query(expr=f"round({grown('andon_learning_seconds_count')})", legend="workers"),
            Query(expr=mean("andon_learning_seconds"), legend="mean time", unit="s"),
            Query(
                expr=grown("andon_learning_wait_seconds_total"), legend="the line waited", unit="s"
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="no worker learnt the state",
    ),
    Amounts(
        title="Stopped processes, in the time shown",
        tells="Workers that the line went on without at once, because their process was stopped "
        "(SIGSTOP, a debugger, a frozen container). They are among the lost departures, too.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(
                expr=f"round({grown('andon_workers_stopped_total')}) > 0",
                legend="workers",
                color=ORANGE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="no process was stopped",
    ),
    Amounts(
        title="Suspected workers, in the time shown",
        tells="Workers that the line went on without at once, because they did not answer while a "
        "round waited for them, and those of them that came back within a lease. Each of these "
        "makes the line more patient with its worker.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(
                expr=f"round({grown('andon_workers_suspected_total')}) > 0",
                legend="suspected",
                color=ORANGE,
            ),
            Query(
                expr=f"round({grown('andon_workers_suspected_wrongly_total')}) > 0",
                legend="wrongly",
                color=ORANGE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="no worker was suspected",
    ),
    Amounts(
        title="Verified since the run began",
        tells="Steps, and grains in them, that workers computed twice before they were committed "
        "(green), attempts in which two results differed (orange), and workers that were convicted "
        "(red).",
        see="docs/guide/same-bits.md#verification",
        queries=(
            Query(
                expr=f"{latest('andon_verified_steps_total')} > 0",
                legend="steps",
                color=GREEN,
            ),
            Query(
                expr=f"{latest('andon_verified_grains_total')} > 0",
                legend="grains",
                color=GREEN,
            ),
            Query(
                expr=f"{latest('andon_verification_differences_total')} > 0",
                legend="differences",
                color=ORANGE,
            ),
            Query(
                expr=f"{latest('andon_convictions_total')} > 0",
                legend="convicted",
                color=RED,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="nothing is verified",
    ),
    Amounts(
        title="Spikes since the run began",
        tells="How often the line dealt with a spike by itself, within its budgets (`--on-spike`): "
        "it scaled the averaged gradient down, left a step's samples out, or dropped a worker.",
        see="docs/halts.md#without-a-person",
        queries=(
            Query(
                expr=f"{latest('andon_spikes_total', 'action')} > 0",
                legend="{{action}}",
                color=ORANGE,
            ),
        ),
        width=6,
        empty="none",
        may_be_empty="there was no spike, or the line halts for each",
    ),
    Curve(
        title="Patience with each worker",
        tells="Time that a worker may be silent while a round waits for it. It begins at the "
        "lease, falls once the line knows how fast the worker answers, and rises after mistakes.",
        see="docs/fault-tolerance.md#slow-workers-and-workers-that-do-not-come",
        queries=(
            Query(
                expr=latest("andon_worker_patience_seconds", "worker"), legend="worker {{worker}}"
            ),
        ),
        unit="s",
        width=6,
        may_be_empty="no worker is here",
    ),
)

ROW = Row(
    title="Why did it stop?",
    panels=((6, _PRESENT), (4, _TIMES), (6, _EVENTS), (6, _LEARNING)),
)
