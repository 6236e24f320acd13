"""Sections: the facts of a run in the order in which people ask for them in the morning."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Sequence

from andon.protocol.limits import on_one_line
from andon_cli.commands.history import halt_line
from andon_cli.drawing.texts import date_text, duration, grouped, short_time, worth_text
from andon_cli.kept_command import resuming
from andon_cli.reporting.facts import ReportFacts, points_of
from andon_cli.reporting.page import Curve, Page, Section, Table
from andon_cli.reporting.slow_section import slow_section
from andon_coordinator.core.operators import BY_ITSELF
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.step_results import Skip
from andon_server.crashes import Crash, CrashKind
from andon_server.halt_words import answers_to, help_page
from andon_server.runs import RUNS

__all__ = ["beside", "page_of"]

_MEMBERSHIP = (
    RunEventKind.JOINED,
    RunEventKind.CAUGHT_UP,
    RunEventKind.NOTICE,
    RunEventKind.LEFT,
    RunEventKind.LOST,
    RunEventKind.DROPPED,
)
_CHECKPOINTS = (RunEventKind.CHECKPOINT, RunEventKind.CHECKPOINT_MISSED)
_TOLD_ELSEWHERE = (
    *_MEMBERSHIP,
    *_CHECKPOINTS,
    RunEventKind.HALTED,
    RunEventKind.ANSWERED,
    RunEventKind.ATTEMPT,
    RunEventKind.SLOW,
)
_ROWS = 200
"""A table shows so many rows; `andon show` and the JSON have the rest."""
_SLOWEST = 5
_MARKED = (RunEventKind.HALTED, RunEventKind.LOST, RunEventKind.WENT_BACK)

_CURVES = (
    ("loss", "loss"),
    ("samples per second", "samples_per_second"),
    ("gradient norm", "gradient_norm"),
    ("seconds a step", "step_seconds"),
)


def page_of(facts: ReportFacts) -> Page:
    """The report of one run."""
    past = facts.run.past
    title = f"Run {past.run_id}: {past.state}"
    if facts.run.totals.steps:
        title += f" after {facts.run.totals.steps} steps"
    sections = [
        Section(title="What was trained", tables=(_overview([facts]),)),
        _next(facts),
        Section(title="How it went", curves=_curves([facts])),
        _halts(facts),
        _samples(facts),
        _workers(facts),
        _ends("Crashes", [each for each in facts.crashes if each.kind is not CrashKind.NOTICE]),
        _ends("Gone by notice", [each for each in facts.crashes if each.kind is CrashKind.NOTICE]),
        slow_section(facts.run.slowness),
        _slow(facts),
        _checkpoints(facts),
        _spent(facts),
        _logged(facts),
        _events("What else happened", _others(facts)),
    ]
    return Page(title=title, sections=tuple(each for each in sections if _says_something(each)))


def beside(first: ReportFacts, second: ReportFacts) -> Page:
    """Two runs beside each other."""
    both = [first, second]
    return Page(
        title=f"Run {first.run.past.run_id} beside run {second.run.past.run_id}",
        sections=(
            Section(title="What was trained", tables=(_overview(both),)),
            Section(title="How they went", curves=_curves(both)),
        ),
    )


# ------------------------------------------------------------------------------ the parts


def _overview(runs: Sequence[ReportFacts]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, value in _OVERVIEW:
        values = [on_one_line(value(facts)) for facts in runs]
        if any(values):
            rows.append((name, *(each or "-" for each in values)))
    if any(facts.price is not None for facts in runs):
        rows.append(("cost", *(_cost(facts) or "-" for facts in runs)))
    return Table(headings=("", *(facts.run.past.run_id for facts in runs)), rows=tuple(rows))


def _plan(facts: ReportFacts) -> str:
    plan = facts.run.plan
    if plan is None:
        return ""
    parts = [f"batch {plan.global_batch}"]
    parts.append(f"of {_count(plan.dataset_size)} samples" if plan.dataset_size else "of a stream")
    if plan.total_steps is not None:
        parts.append(f"{plan.total_steps} steps")
    if plan.total_epochs is not None:
        parts.append(f"{plan.total_epochs} epochs")
    if plan.grain:
        parts.append(f"same bits in grains of {plan.grain}")
    return ", ".join([*parts, f"seed {plan.seed}"])


def _loss(facts: ReportFacts) -> str:
    totals = facts.run.totals
    if totals.lowest is None:
        return ""
    lowest, step = totals.lowest
    return (
        f"{totals.losses[0]:.4g} at first, {totals.losses[-1]:.4g} at last, lowest {lowest:.4g} "
        f"(step {step})"
    )


def _weights(facts: ReportFacts) -> str:
    ends = {gone.digest for gone in facts.run.departures if gone.step == facts.run.totals.steps}
    digests = sorted(ends - {""})
    if len(digests) > 1:
        return f"they differ: {', '.join(each[:12] for each in digests)}"
    return f"all workers at SHA-256 {digests[0][:12]}" if digests else ""


def _rate(facts: ReportFacts) -> str:
    seconds, samples = facts.spent.total_s, facts.run.totals.samples
    if seconds <= 0 or not samples:
        return ""
    return f"{_count(samples)} samples, {grouped(samples / seconds)} a second with all waits"


def _command(facts: ReportFacts) -> str:
    return shlex.join(facts.command.command) if facts.command else ""


_OVERVIEW: tuple[tuple[str, Callable[[ReportFacts], str]], ...] = (
    ("command", _command),
    ("plan", _plan),
    ("model", lambda facts: (facts.run.layout_digest or "")[:12]),
    ("state", lambda facts: facts.run.past.state),
    ("ended", lambda facts: facts.ended_because),
    ("began", lambda facts: date_text(facts.run.past.started_unix_s)),
    ("took", lambda facts: duration(facts.spent.total_s)),
    ("steps", lambda facts: str(facts.run.totals.steps)),
    ("samples", _rate),
    ("loss", _loss),
    ("weights", _weights),
    ("workers", lambda facts: str(len(facts.presences) or len(facts.run.workers))),
    ("worker hours", lambda facts: f"{facts.worker_hours:.2f}"),
    ("halts", lambda facts: str(len(facts.run.halts))),
    ("workers lost", lambda facts: str(sum(each.losses for each in facts.presences))),
    ("gone by notice", lambda facts: str(sum(each.notices for each in facts.presences))),
    ("journal", lambda facts: str(facts.run.past.folder)),
)


def _next(facts: ReportFacts) -> Section:
    """What to do now, as exact commands."""
    past = facts.run.past
    usual = (RUNS / past.run_id).absolute() == past.folder.absolute()
    named = past.run_id if usual else shlex.quote(str(past.folder))
    commands: list[tuple[str, str]] = []
    says: list[str] = []
    unanswered = [halt for halt in facts.run.halts if halt.is_open]
    if past.state == "halted" and unanswered:
        evidence = unanswered[-1].evidence
        answers = answers_to(evidence, flags=f"--run {named}")
        says.append(f"It waits for an answer. What the halt means: {help_page(evidence)}")
        commands += [(each.command, each.effect) for each in answers]
    elif past.state == "running":
        commands.append((f"andon status --run {named} --watch", "what it is doing now"))
    if past.state in ("stopped", "halted", "drained"):
        if facts.checkpoint_step is not None:
            does = f"goes on from the checkpoint of step {facts.checkpoint_step}"
            if past.state == "halted":
                does += ", once its service has ended"
            commands.append((resuming(facts.command, named, past.workers), does))
        elif facts.checkpoint_problem:
            says.append(f"No checkpoint of it can be used: {facts.checkpoint_problem}")
        else:
            says.append("It has no checkpoint, so it can only begin again.")
    commands.append((f"andon show {named} STEP", "who computed what of a step"))
    commands.append((f"andon export {named} > steps.csv", "all steps, for pandas"))
    return Section(title="What to do now", says=tuple(says), commands=tuple(commands))


def _curves(runs: Sequence[ReportFacts]) -> tuple[Curve, ...]:
    found = []
    for title, name in _CURVES:
        series = tuple((each.run.past.run_id, points_of(each.steps, name)) for each in runs)
        if any(value is not None for _, points in series for _, value in points):
            marks = _marks(runs[0]) if len(runs) == 1 and name == "loss" else ()
            found.append(Curve(name=title, series=series, marks=marks))
    names = sorted({name for each in runs for name in each.logged})
    for name in names:
        series = tuple((each.run.past.run_id, each.logged.get(name, [])) for each in runs)
        found.append(Curve(name=on_one_line(name), series=series))
    return tuple(found)


def _marks(facts: ReportFacts) -> tuple[tuple[int, str], ...]:
    marked = facts.events(*_MARKED)[:_ROWS]
    return tuple((each.step, _what(each)) for each in marked)


def _halts(facts: ReportFacts) -> Section:
    rows = []
    # A step that is tried again may halt again, so each halt takes the first answer that is left.
    answers: dict[int, deque[float]] = {}
    for event in facts.events(RunEventKind.ANSWERED):
        answers.setdefault(event.step, deque()).append(event.at_unix_s)
    for halt in facts.run.halts:
        left = answers.get(halt.evidence.step)
        at = left.popleft() if left and halt.answer is not None else None
        stood = duration(max(0.0, at - halt.at_unix_s)) if at is not None else "-"
        place = halt.evidence.place or "-"
        rows.append((date_text(halt.at_unix_s), halt_line(halt), on_one_line(place), stood))
    if not rows:
        return Section(title="Halts", says=("The line never stopped.",))
    table = Table(headings=("when", "what", "where", "stood"), rows=tuple(rows[-_ROWS:]))
    return Section(title="Halts", says=_earlier(len(facts.run.halts)), tables=(table,))


def _samples(facts: ReportFacts) -> Section:
    """Which samples count, and which do not."""
    totals, says = facts.run.totals, []
    says.append(f"{_count(totals.samples)} samples are in {totals.steps} committed steps.")
    count, samples, seconds = facts.rolled_back
    if count:
        says.append(
            f"{count} steps of {_count(samples)} samples were rolled back: {duration(seconds)} of "
            "work that does not count."
        )
    if facts.ledger is None:
        says.append("The ledger was not counted: the run is too long for a report.")
    elif facts.ledger:
        says.append(
            f"The ledger has {len(facts.ledger)} faults: positions in no record, or in several."
        )
    else:
        says.append("Every position is in exactly one committed step, or skipped.")
    rows = tuple(
        (
            str(epoch),
            f"{positions.start} to {positions.stop - 1}",
            str(len(positions)),
            _skipped_by(each),
            on_one_line(each.operator) or "-",
        )
        for each in facts.skips[-_ROWS:]
        for epoch, positions in each.by_epoch
    )
    skipped = Table(headings=("epoch", "positions", "samples", "skipped by", "who"), rows=rows)
    return Section(title="Samples", says=tuple(says), tables=(skipped,) if rows else ())


def _skipped_by(skip: Skip) -> str:
    if skip.halt_id:
        return f"the answer to halt {skip.halt_id}"
    return "the line, for a spike" if skip.operator == BY_ITSELF else "the script left its epoch"


def _workers(facts: ReportFacts) -> Section:
    trained = {each.worker: each for each in facts.run.workers}
    rows = []
    for presence in facts.presences:
        total = trained.get(presence.worker)
        rows.append(
            (
                str(presence.worker),
                "0" if total is None else str(total.steps),
                "0" if total is None else _count(total.samples),
                "-" if total is None else f"{total.first_step} to {total.last_step}",
                duration(presence.seconds),
                str(presence.joins),
                str(presence.losses),
                str(presence.notices),
            )
        )
    headings = ("worker", "steps", "samples", "from", "on the line", "joins", "losses", "notices")
    events = facts.events(*_MEMBERSHIP)
    tables = [Table(headings=headings, rows=tuple(rows))] if rows else []
    tables += [_event_table(events)] if events else []
    return Section(title="Workers", says=_earlier(len(events)), tables=tuple(tables))


def _ends(title: str, ends: Sequence[Crash]) -> Section:
    """How processes of this host ended early."""
    rows = tuple(
        (
            date_text(each.at_unix_s),
            each.name,
            str(each.step),
            each.kind.value.replace("_", " "),
            on_one_line(each.text),
            duration(each.ran_s),
            f"{each.memory_bytes / 2**30:.2f} GiB" if each.memory_bytes else "-",
            "yes" if each.starts_again else "no",
        )
        for each in ends[-_ROWS:]
    )
    headings = ("when", "who", "step", "kind", "why", "ran", "memory", "started again")
    tables = (Table(headings=headings, rows=rows),) if rows else ()
    return Section(title=title, says=_earlier(len(ends)), tables=tables)


def _slow(facts: ReportFacts) -> Section:
    totals = facts.run.totals
    if totals.median_s is None:
        return Section(title="Slow steps")
    first = totals.steps - len(totals.times_s) + 1
    slowest = sorted(
        ((time_s, first + at) for at, time_s in enumerate(totals.times_s)), reverse=True
    )
    says = [f"A step took {short_time(totals.median_s)} (median)."]
    why: dict[int, list[str]] = {}
    for event in facts.run.events:
        if event.kind is not RunEventKind.CHECKPOINT:
            why.setdefault(event.step, []).append(_what(event))
    rows = tuple(
        (str(step), short_time(time_s), "; ".join(why.get(step, ["-"])[:3]))
        for time_s, step in slowest[:_SLOWEST]
    )
    tables = [Table(headings=("slowest", "took", "what happened in it"), rows=rows)]
    if facts.attempts_by_cause:
        causes = tuple(
            (on_one_line(cause), str(count)) for cause, count in facts.attempts_by_cause[:_ROWS]
        )
        tables.append(Table(headings=("why steps were tried again", "times"), rows=causes))
    return Section(title="Slow steps", says=tuple(says), tables=tuple(tables))


def _checkpoints(facts: ReportFacts) -> Section:
    events = facts.events(*_CHECKPOINTS)
    says = []
    if facts.checkpoint_step is not None:
        says.append(f"The newest whole checkpoint is of step {facts.checkpoint_step}.")
    elif facts.checkpoint_problem:
        says.append(facts.checkpoint_problem)
    else:
        says.append("There is none.")
    tables = (_event_table(events),) if events else ()
    return Section(title="Checkpoints", says=(*says, *_earlier(len(events))), tables=tables)


def _spent(facts: ReportFacts) -> Section:
    spent, hours, price = facts.spent, facts.worker_hours, facts.price
    if not spent.total_s:
        return Section(title="Time and cost")
    parts = (
        ("training: attempts that were committed", spent.training_s),
        ("halted", spent.halted_s),
        ("the service was away", spent.away_s),
        ("joining, repeated attempts, waiting for workers", spent.rest_s),
    )
    headings = ["time", "seconds", "share"]
    headings += [] if price is None else ["cost"]
    rows = []
    for name, seconds in parts:
        share = seconds / spent.total_s
        row = [name, f"{seconds:.1f}", f"{share * 100:.1f} %"]
        rows.append(tuple(row if price is None else [*row, _cost(facts, share)]))
    says = [f"{hours:.2f} worker hours."]
    if price is not None and (worth := worth_text(*facts.per_unit)):
        unit = f" {price.currency}" if price.currency else ""
        says.append(
            f"{_cost(facts)} at {price.per_hour:g}{unit} an hour and worker: {worth} for 1{unit}."
        )
    return Section(
        title="Time and cost",
        says=tuple(says),
        tables=(Table(headings=tuple(headings), rows=tuple(rows)),),
    )


def _logged(facts: ReportFacts) -> Section:
    rows = tuple(
        (
            on_one_line(each.name),
            *(f"{value:.6g}" for value in (each.first, each.last, each.lowest, each.highest)),
            str(each.points),
        )
        for each in facts.run.scalars
    )
    headings = ("logged", "first", "last", "lowest", "highest", "steps")
    tables = (Table(headings=headings, rows=rows),) if rows else ()
    return Section(title="What the script logged", tables=tables)


def _others(facts: ReportFacts) -> list[RunEvent]:
    return [each for each in facts.run.events if each.kind not in _TOLD_ELSEWHERE]


# ------------------------------------------------------------------------------ the words


def _events(title: str, events: Sequence[RunEvent]) -> Section:
    tables = (_event_table(events),) if events else ()
    return Section(title=title, says=_earlier(len(events)), tables=tables)


def _event_table(events: Sequence[RunEvent]) -> Table:
    rows = tuple(
        (
            date_text(each.at_unix_s),
            str(each.step),
            "line" if each.worker is None else f"worker {each.worker}",
            each.kind.value.replace("_", " "),
            on_one_line(each.text),
        )
        for each in events[-_ROWS:]
    )
    return Table(headings=("when", "step", "who", "what", ""), rows=rows)


def _earlier(count: int) -> tuple[str, ...]:
    return (f"The last {_ROWS} of {count}; JSON has all.",) if count > _ROWS else ()


def _what(event: RunEvent) -> str:
    who = "" if event.worker is None else f"worker {event.worker} "
    return on_one_line(f"{who}{event.kind.value.replace('_', ' ')}: {event.text}")


def _says_something(section: Section) -> bool:
    return bool(section.says or section.tables or section.curves or section.commands)


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _cost(facts: ReportFacts, share: float = 1.0) -> str:
    """A part of what the run cost, with the currency; empty without a price."""
    if facts.price is None or facts.cost is None:
        return ""
    return f"{facts.cost * share:.2f} {facts.price.currency}".rstrip()
