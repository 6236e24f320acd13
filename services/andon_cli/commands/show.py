"""`andon show`: a run, or one of its steps, as its journal has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from andon.host.errors import ExitCode
from andon.host.strict_json import strict_json
from andon.protocol.arithmetic import difference
from andon.protocol.limits import on_one_line
from andon.protocol.records import PositionRange, accuracy_of
from andon_cli.commands.epochs import epoch_lines
from andon_cli.commands.history import halt_line
from andon_cli.commands.run_facts import RunFacts, ScalarSummary, StepFacts, find_folder
from andon_cli.drawing.slow_texts import slow_brief
from andon_cli.drawing.texts import (
    accuracy_text,
    aligned,
    date_text,
    duration,
    grouped,
    moment_text,
    short_time,
    sparkline,
    verified_text,
)
from andon_cli.questions import ShowConfig
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.step_results import StepContribution
from andon_coordinator.transport.damage import journal_errors
from andon_coordinator.transport.reader import JournalEntry, RecordedDeparture
from andon_server.runs import JOURNAL

__all__ = ["event_rows", "run_lines", "show_run", "step_lines"]

_EVENTS_SHOWN = 20
_SPARK_CELLS = 40
_SLOW_SHOWN = 5
_RANGES_SHOWN = 4
_OF_ARITHMETIC = ("processor", "gpu", "torch", "threads")
"""What is shown of an arithmetic; JSON has all of it."""


def show_run(config: ShowConfig) -> int:
    """Shows a run or a step. Returns the exit code.

    Raises:
        UsageError: there is no such run, or it has no such step.
        JournalError: its journal can't be read.
    """
    folder = find_folder(config.run)
    # What was read is put into words here too: only there some damage shows.
    with journal_errors(folder / JOURNAL):
        fields, lines = _run(folder) if config.step is None else _step(folder, config.step)
        wants_json = config.settings.format == "json"
        text = strict_json(fields) if wants_json else "\n".join(map(on_one_line, lines))
    print(text)
    return ExitCode.COMPLETE


def _run(folder: Path) -> tuple[dict[str, Any], list[str]]:
    facts = RunFacts.read(folder)
    return facts.fields(), run_lines(facts)


def _step(folder: Path, step: int) -> tuple[dict[str, Any], list[str]]:
    facts = StepFacts.read(folder, step)
    return facts.fields(), step_lines(facts)


def run_lines(facts: RunFacts) -> list[str]:
    """A run as text: what it is, how it went, who took part, and what happened."""
    past, totals = facts.past, facts.totals
    lines = [f"run {past.run_id}  {past.state}  {date_text(past.started_unix_s)}  {past.folder}"]
    lines += _plan_lines(facts)
    if totals.steps:
        lines += _step_summary(facts)
    if facts.verified.steps or facts.verified.differences:
        lines.append(f"proof     {verified_text(facts.verified)}")
    if past.gaps:
        lines.append(
            f"its journal lacks steps before step {past.last_gap_step}: it lost its end, or an "
            "older copy was put in its place"
        )
    if facts.workers:
        rows = [
            (
                str(each.worker),
                str(each.steps),
                grouped(each.samples),
                f"{each.first_step} to {each.last_step}",
                _went([gone for gone in facts.departures if gone.worker == each.worker]),
            )
            for each in facts.workers
        ]
        lines += ["", *aligned([("worker", "steps", "samples", "from", "went"), *rows])]
    if epochs := epoch_lines(facts.epochs):
        lines += ["", *epochs]
    if facts.scalars:
        lines += ["", *aligned([_SCALARS, *map(_scalar_row, facts.scalars)])]
    if facts.slowness:
        lines += ["", *(f"slow      {slow_brief(each)}" for each in facts.slowness[-_SLOW_SHOWN:])]
    if facts.halts:
        lines += ["", *(halt_line(halt) for halt in facts.halts)]
    if facts.events:
        lines += ["", *_events(facts.events)]
    return lines


def step_lines(facts: StepFacts) -> list[str]:
    """A step as text: its records, who computed what of it, and what happened in it."""
    lines = [f"run {facts.run_id}  step {facts.step}"]
    for entry, kept in facts.records:
        lines += _record_lines(entry, kept=kept)
    if not facts.records:
        lines.append("it is not committed")
    for name, group in groupby(facts.scalars, key=lambda each: each.name):
        values = [f"{each.value:.6g} (worker {each.worker})" for each in group]
        lines.append(f"logged    {name}  {', '.join(values)}")
    lines += [halt_line(halt) for halt in facts.halts]
    if facts.events:
        lines += ["", *event_rows(facts.events)]
    return lines


def event_rows(events: Sequence[RunEvent]) -> list[str]:
    """Run events as aligned lines: when, in which step, what, who, and how."""
    rows = [
        (
            moment_text(each.at_unix_s),
            f"step {each.step}",
            each.kind.value.replace("_", " "),
            "" if each.worker is None else f"worker {each.worker}",
            on_one_line(each.text),
        )
        for each in events
    ]
    return aligned(rows)


def _plan_lines(facts: RunFacts) -> list[str]:
    plan = facts.plan
    if plan is None and any(each.kind is RunEventKind.SESSION for each in facts.events):
        return ["its ranks attend sessions"]
    if plan is None:
        return ["nobody has joined it yet"]
    data = f"of {grouped(plan.dataset_size)} samples" if plan.dataset_size else "of a stream"
    parts = [f"batch {plan.global_batch} {data}", f"seed {plan.seed}"]
    if plan.total_steps is not None:
        parts.append(f"{plan.total_steps} steps")
    if plan.total_epochs is not None:
        parts.append(f"{plan.total_epochs} epochs")
    if plan.drop_last:
        parts.append("whole batches only")
    if plan.grain:
        parts.append(f"same bits in grains of {plan.grain}")
    return [f"plan      {', '.join(parts)}", *_arithmetic_lines(facts)]


def _arithmetic_lines(facts: RunFacts) -> list[str]:
    """Which arithmetic the run had, and who joined with another one."""
    if not facts.arithmetics:
        return []
    line = facts.arithmetics[0].items
    stated = dict(line)
    parts = [f"{name} {stated[name]}" for name in _OF_ARITHMETIC if stated.get(name)]
    shared = "one of all workers: " if facts.one_arithmetic else "they differ; the first has "
    lines = [f"computes  {shared}{', '.join(parts) or f'{len(stated)} things stated'}"]
    for each in facts.arithmetics:
        if (found := difference(each.items, line)) is not None:
            name, mine, theirs = found
            where = f" on {each.node_id}" if each.node_id else ""
            lines.append(
                f"          worker {each.worker}{where}, after step {each.step}: {name} {mine}, "
                f"not {theirs}"
            )
    return lines


def _step_summary(facts: RunFacts) -> list[str]:
    totals, seconds = facts.totals, facts.past.seconds
    parts = [f"{totals.steps} steps, {grouped(totals.samples)} samples"]
    if seconds > 0:
        rate = grouped(totals.samples / seconds)
        parts.append(f"in {duration(seconds)}, {rate} samples/s with all waits")
    if totals.attempts:
        parts.append(f"{_attempts(totals.attempts)} came to nothing")
    if totals.overflows:
        parts.append(f"{totals.overflows} overflowed")
    lines = [f"steps     {'; '.join(parts)}"]
    if totals.median_s is not None and totals.slowest is not None:
        slowest_s, step = totals.slowest
        lines.append(
            f"time      {short_time(totals.median_s)} a step (median), the slowest "
            f"{short_time(slowest_s)} (step {step})"
        )
    if totals.lowest is not None:
        lowest, step = totals.lowest
        lines.append(
            f"loss      {totals.losses[0]:.3f} to {totals.losses[-1]:.3f}  "
            f"{sparkline(totals.losses, _SPARK_CELLS)}  lowest {lowest:.3f} (step {step})"
        )
    if facts.past.accuracy is not None:
        lines.append(f"last step {accuracy_text(facts.past.accuracy)}")
    return lines


_SCALARS = ("logged", "last", "lowest", "highest", "steps", "")


def _scalar_row(scalar: ScalarSummary) -> tuple[str, ...]:
    return (
        scalar.name,
        f"{scalar.last:.6g}",
        f"{scalar.lowest:.6g}",
        f"{scalar.highest:.6g}",
        str(scalar.points),
        sparkline(scalar.curve, _SPARK_CELLS),
    )


def _went(departures: Sequence[RecordedDeparture]) -> str:
    if not departures:
        return "-"
    last = departures[-1]
    digest = f", weights {last.digest[:8]}" if last.digest else ""
    times = f" ({len(departures)} times)" if len(departures) > 1 else ""
    return f"{last.reason.lower()} after step {last.step}{digest}{times}"


def _events(events: Sequence[RunEvent]) -> list[str]:
    earlier = len(events) - _EVENTS_SHOWN
    more = [f"{earlier} earlier events: --format json"] if earlier > 0 else []
    return [*more, *event_rows(events[-_EVENTS_SHOWN:])]


def _record_lines(entry: JournalEntry, *, kept: bool) -> list[str]:
    record, result = entry.record, entry.result
    assert result is not None
    after = "" if record.parent is None else f" after {record.parent}"
    what = "" if kept else ", ROLLED BACK: not in the line's history any more"
    lines = [
        f"record    {record.key}{after}, {date_text(entry.at_unix_s)}{what}",
        f"batch     epoch {result.epoch}, {_ranges([result.batch])}: {result.samples} samples, "
        f"weight {result.weight:g}",
        f"time      {short_time(result.seconds)}, {_attempt(result.attempt)}",
    ]
    parts = [f"{result.loss:.6g}"]
    accuracy = accuracy_of(result.correct, result.samples)
    if accuracy is not None:
        parts.append(accuracy_text(accuracy))
    if result.gradient_norm is not None:
        parts.append(f"gradient norm {result.gradient_norm:.6g}")
    lines.append(f"loss      {'  '.join(parts)}")
    if result.change_scale is not None:
        owed = sum(map(len, entry.record.cursor.owed))
        lines.append(
            f"window    change times {result.change_scale:g}, {owed} positions owed after it"
        )
    if result.trimmed is not None:
        lines.append(f"mean      {result.mean_in_words}")
    if result.overflow:
        lines.append("overflow  scaled gradients overflowed: no weight moved")
    if result.stop_reason:
        lines.append(f"the last step: {on_one_line(result.stop_reason)}")
    if entry.note:
        lines.append(f"note      {on_one_line(entry.note)}")
    if result.contributions:
        headings = ("worker", "rank", "samples", "weight", "loss", "positions")
        lines += ["", *aligned([headings, *map(_contribution_row, result.contributions)])]
    return lines


def _attempt(attempt: int) -> str:
    if attempt == 0:
        return "at the first attempt"
    return f"after {_attempts(attempt)} that came to nothing"


def _attempts(count: int) -> str:
    return "one attempt" if count == 1 else f"{count} attempts"


def _contribution_row(part: StepContribution) -> tuple[str, ...]:
    return (
        str(part.worker),
        str(part.rank),
        str(part.samples),
        f"{part.weight:g}",
        f"{part.loss_sum / part.weight:.6g}" if part.weight else "-",
        _ranges(part.positions) + (f", late by {part.late} steps" if part.late else ""),
    )


def _ranges(ranges: Iterable[PositionRange]) -> str:
    """Positions as people write them, the last one included: `7488 to 7530`."""
    texts = [
        str(each.start) if len(each) == 1 else f"{each.start} to {each.stop - 1}"
        for each in ranges
        if len(each)
    ]
    if not texts:
        return "none"
    more = len(texts) - _RANGES_SHOWN
    return ", ".join(texts[:_RANGES_SHOWN]) + (f" and {more} more ranges" if more > 0 else "")
