"""Is the line running?"""

from __future__ import annotations

from andon_grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Curve,
    Facts,
    Lanes,
    Number,
    Query,
    Row,
)
from andon_grafana.promql import code, latest, of, rate

__all__ = ["ROW", "SHOWN", "STATES"]

STATES = {
    "forming": (1, "FORMING", BLUE),
    "running": (2, "RUNNING", GREEN),
    "syncing": (3, "SYNCING", YELLOW),
    "complete": (4, "COMPLETE", BLUE),
    "draining": (5, "DRAINING", ORANGE),
    "halted": (6, "HALTED", RED),
}
"""The number, text and colour of each state of the line."""

_STATE = code("andon_line_state", "state", {name: each[0] for name, each in STATES.items()})
SHOWN = {number: (text, color) for number, text, color in STATES.values()}
"""How each number is shown."""
_LIVE = latest("andon_workers", where=('state="live"',))
_EXPECTED = latest("andon_workers_expected")
_LEFT = f"{latest('andon_steps_planned')} - {latest('andon_step')}"
# The slope of five minutes, so that one slow step does not move the end by an hour. The counter's
# rate would be too low until the run is that old: a rate divides by its whole window.
_PACE = f"max(deriv({of('andon_step')}[5m]))"

_NOW = (
    Number(
        title="State",
        tells="What the line does now. Green: it trains. Red: it is halted, no weight moves, and "
        "it waits for your answer: `andon status` shows the evidence, `andon resume` answers. "
        "No answer: the service is down, or Prometheus does not reach it; look at *Scrape health*.",
        see="docs/runbooks/LineHalted.md",
        queries=(Query(expr=_STATE),),
        width=4,
        empty="NO ANSWER",
        base=ORANGE,
        states=SHOWN,
    ),
    Number(
        title="Step",
        tells="The step that was committed last. It should grow. If it does not, and the state is "
        "RUNNING, look at *Who holds it up*.",
        see="docs/metrics.md#the-line-and-its-steps",
        queries=(Query(expr=latest("andon_step")),),
        width=4,
    ),
    Number(
        title="Loss",
        tells="The last committed step's loss over all workers. Before the first step there is "
        "none.",
        see="docs/guide/losses.md",
        queries=(Query(expr=latest("andon_step_loss")),),
        width=4,
        decimals=4,
        empty="no step yet",
        may_be_empty="there is no loss before the first step",
    ),
    Number(
        title="Workers",
        tells="How many workers are live, how many take part in the present round, and how many "
        "the line expects.",
        see="docs/fault-tolerance.md#slow-workers-and-workers-that-do-not-come",
        queries=(
            Query(expr=_LIVE, legend="live"),
            Query(
                expr=latest("andon_workers", where=('state="participating"',)),
                legend="in the round",
            ),
            Query(expr=_EXPECTED, legend="expected"),
        ),
        width=5,
    ),
    Number(
        title="Missing",
        tells="Workers that the line expects and that are not live. Look at their hosts and at "
        "`worker-N.log` in the run's folder. The others go on without them.",
        see="docs/runbooks/WorkersBelowExpected.md",
        queries=(Query(expr=f"clamp_min({_EXPECTED} - {_LIVE}, 0)"),),
        width=3,
        thresholds=((0, GREEN), (1, RED)),
    ),
    Number(
        title="Time left",
        tells="Until the last planned step, at the pace of the last five minutes. A halt makes it "
        "longer, as it should.",
        see="docs/metrics.md#the-line-and-its-steps",
        queries=(Query(expr=f"({_LEFT}) / ({_PACE} > 0)"),),
        width=4,
        unit="dtdurations",
        # Grafana then says two units: hours and minutes, or minutes and seconds.
        decimals=1,
        empty="not known",
        may_be_empty="the number of steps is not known, or none was committed lately",
    ),
)

_HISTORY = (
    Lanes(
        title="What the line did",
        tells="The line's state over time. Yellow is a pause in which newcomers get the weights; "
        "red is time that waited for a person.",
        see="docs/concepts/line.md",
        queries=(Query(expr=_STATE, legend="line"),),
        width=16,
        states=SHOWN,
    ),
    Facts(
        title="How it trains",
        tells="The run's schedule, how gradients travel, and the encodings on the way there and "
        "back. Two rows in the time shown: the run was started again with other settings.",
        see="docs/settings.md",
        queries=(
            Query(
                expr=latest("andon_run_info", "schedule", "topology", "encoding", "answers"),
                legend="{{schedule}} {{topology}} {{encoding}}/{{answers}}",
            ),
        ),
        width=5,
    ),
    Number(
        title="Local steps",
        tells="Optimizer steps that each worker makes alone between two exchanges; 0: gradients "
        "are exchanged in every step.",
        see="docs/guide/local-steps.md",
        queries=(Query(expr=latest("andon_local_steps")),),
        width=3,
    ),
)

_TRAINING = (
    Curve(
        title="Loss over time",
        tells="The loss of committed steps. A hole is a time without steps; a step that halted "
        "the line is not here, because it was not committed.",
        see="docs/guide/losses.md",
        queries=(Query(expr=latest("andon_step_loss"), legend="loss"),),
        width=6,
        may_be_empty="there is no loss before the first step",
    ),
    Curve(
        title="Accuracy",
        tells="The part of each step's samples that the model got right. Only if the script counts "
        "them: `line.backward(loss, correct=n)`.",
        see="docs/guide/losses.md",
        queries=(Query(expr=latest("andon_step_accuracy_ratio"), legend="accuracy"),),
        width=6,
        unit="percentunit",
        limits=(0, 1),
        may_be_empty="the script does not count what the model got right",
    ),
    Curve(
        title="What the script logs",
        tells='The values that the script reports with `line.log({"val": ...})`, the mean over '
        "the workers that logged it. NaN is allowed here and leaves a hole; it does not halt the "
        "line.",
        see="docs/guide/logging.md",
        queries=(Query(expr=latest("andon_logged_value", "name"), legend="{{name}}"),),
        width=6,
        may_be_empty="the script logs nothing",
    ),
    Curve(
        title="Steps committed a second",
        tells="The line's pace. If it falls, *Who holds it up* says who, and *What does it cost* "
        "says where the time goes.",
        see="docs/performance.md#first-see-where-the-time-goes",
        queries=(Query(expr=rate("andon_steps_committed_total"), legend="steps"),),
        width=6,
        unit="suffix:steps/s",
    ),
)

_CROWD = (
    Curve(
        title="Workers over time",
        tells="Live workers, those in the round, and those that are expected. A step down is a "
        "worker that was lost or left; a step up is one that joined.",
        see="docs/fault-tolerance.md#what-happens-at-each-fault",
        queries=(
            Query(expr=_LIVE, legend="live", color=GREEN),
            Query(
                expr=latest("andon_workers", where=('state="participating"',)),
                legend="in the round",
                color=BLUE,
            ),
            Query(expr=_EXPECTED, legend="expected", color=GREY),
        ),
        width=12,
    ),
    Curve(
        title="Samples committed a second",
        tells="The line's throughput: samples in committed steps.",
        see="docs/performance.md#what-to-expect",
        queries=(Query(expr=rate("andon_samples_committed_total"), legend="samples"),),
        width=12,
        unit="count:samples/s",
    ),
)

ROW = Row(
    title="Is the line running?",
    panels=((4, _NOW), (5, _HISTORY), (8, _TRAINING), (7, _CROWD)),
)
