"""Run facts: what `andon show` and `andon export` read from a run's journal, also while it runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from andon.host.errors import UsageError
from andon.protocol.arithmetic import is_one
from andon.protocol.records import accuracy_of
from andon.protocol.run_settings import RunPlan
from andon.protocol.slowness import Slowness
from andon_cli.commands.epochs import EpochTotals, add_step
from andon_cli.drawing.slow_texts import slow_fields
from andon_coordinator.core.run_events import RunEvent
from andon_coordinator.core.verification import VerifiedTotals
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import (
    JournalEntry,
    LoggedScalar,
    RecordedArithmetic,
    RecordedDeparture,
    RecordedHalt,
)
from andon_coordinator.transport.step_reader import StepReader, WorkerTotal
from andon_server.book import halt_fields
from andon_server.past_runs import PastRun, read_run
from andon_server.runs import JOURNAL, RUNS

__all__ = [
    "RunFacts",
    "ScalarSummary",
    "StepFacts",
    "StepTotals",
    "event_fields",
    "find_folder",
    "reading",
]


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """The committed steps of a run, taken together."""

    steps: int = 0
    samples: int = 0
    attempts: int = 0
    """Attempts at these steps that came to nothing."""
    overflows: int = 0
    """Steps that moved no weight, because scaled gradients overflowed."""
    losses: list[float] = field(default_factory=list)
    """NaN where all workers abstained."""
    times_s: list[float] = field(default_factory=list)
    at_unix_s: list[float] = field(default_factory=list)
    """When each was committed."""
    began_unix_s: float | None = None
    """When the first step was committed."""
    ended_unix_s: float | None = None
    """When the last one was."""

    def add(self, entry: JournalEntry) -> None:
        """Adds a committed step, in the order of steps."""
        result = entry.result
        assert result is not None
        self.steps = entry.record.step
        self.samples += result.samples
        self.attempts += result.attempt
        self.overflows += result.overflow
        self.losses.append(result.loss)
        self.times_s.append(result.seconds)
        self.at_unix_s.append(entry.at_unix_s)
        self.ended_unix_s = entry.at_unix_s
        if self.began_unix_s is None:
            self.began_unix_s = entry.at_unix_s - result.seconds

    @property
    def lowest(self) -> tuple[float, int] | None:
        """The lowest loss and its step; None if no loss is a number."""
        first = self.steps - len(self.losses) + 1
        found = [(loss, first + at) for at, loss in enumerate(self.losses) if math.isfinite(loss)]
        return min(found, default=None)

    @property
    def slowest(self) -> tuple[float, int] | None:
        """The time of the slowest step in seconds, and that step; None before the first."""
        first = self.steps - len(self.times_s) + 1
        return max(((time, first + at) for at, time in enumerate(self.times_s)), default=None)

    @property
    def median_s(self) -> float | None:
        """The time of a step in the middle; None before the first."""
        return statistics.median(self.times_s) if self.times_s else None

    def fields(self) -> dict[str, Any]:
        """For JSON, without the series themselves."""
        lowest, slowest = self.lowest or (None, None), self.slowest or (None, None)
        return {
            "steps": self.steps,
            "samples": self.samples,
            "failed_attempts": self.attempts,
            "overflows": self.overflows,
            "began_unix_s": self.began_unix_s,
            "ended_unix_s": self.ended_unix_s,
            "loss": {
                "first": self.losses[0] if self.losses else None,
                "last": self.losses[-1] if self.losses else None,
                "lowest": lowest[0],
                "lowest_step": lowest[1],
            },
            "step_s": {"median": self.median_s, "slowest": slowest[0], "slowest_step": slowest[1]},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSummary:
    """What a script logged under one name; the mean over the workers of each step."""

    name: str
    points: int
    first: float
    last: float
    lowest: float
    """Of the finite ones; NaN if there are none."""
    highest: float
    curve: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, curve: list[tuple[int, float]]) -> ScalarSummary:
        """The summary of a curve, which is not empty."""
        values = [value for _, value in curve]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        return cls(
            name=name, points=len(values), first=values[0], last=values[-1], lowest=min(finite),
            highest=max(finite), curve=tuple(values),
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """For JSON, without the curve."""
        names = ("name", "points", "first", "last", "lowest", "highest")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that a journal says of a run as a whole."""

    past: PastRun
    plan: RunPlan | None
    layout_digest: str | None
    totals: StepTotals
    epochs: list[EpochTotals]
    """In which steps were committed; the last one may not be over."""
    workers: list[WorkerTotal]
    departures: list[RecordedDeparture]
    halts: list[RecordedHalt]
    events: list[RunEvent]
    scalars: list[ScalarSummary]
    arithmetics: list[RecordedArithmetic]
    """With which its workers joined, if it has the same bits; the first one's is the line's."""
    verified: VerifiedTotals
    slowness: list[Slowness]
    """Why workers were slow, in order."""

    @classmethod
    def read(cls, folder: Path) -> RunFacts:
        """Reads the journal in a run's folder.

        Raises:
            JournalError: there is none, or it can't be read.
        """
        past = read_run(folder)
        if past.problem:
            raise JournalError(past.problem)
        with reading(folder) as reader:
            run = reader.run()
            totals, epochs = StepTotals(), dict[int, EpochTotals]()
            for step in reader.steps_forward():
                totals.add(step.entry)
                add_step(epochs, step.entry)
            return cls(
                past=past,
                plan=run.plan,
                layout_digest=run.layout_digest,
                totals=totals,
                epochs=list(epochs.values()),
                workers=reader.worker_totals(),
                departures=reader.departures(),
                halts=reader.halts(),
                events=reader.run_events(),
                scalars=[
                    ScalarSummary.of(name, reader.scalar_curve(name))
                    for name in reader.scalar_names()
                ],
                arithmetics=reader.arithmetics(),
                verified=reader.verified(),
                slowness=reader.slownesses(),
            )

    @property
    def one_arithmetic(self) -> bool:
        """Whether all its workers ever stated the same."""
        return bool(self.arithmetics) and is_one(*(each.items for each in self.arithmetics))

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        past = self.past
        return {
            "run_id": past.run_id,
            "folder": str(past.folder),
            "state": past.state,
            "started_unix_s": past.started_unix_s,
            "seconds": past.seconds,
            "plan": None if self.plan is None else asdict(self.plan),
            "layout_digest": self.layout_digest,
            **self.totals.fields(),
            "epochs": [each.fields() for each in self.epochs],
            "accuracy": past.accuracy,
            "workers": [
                asdict(each)
                | {
                    "departures": [
                        {"reason": gone.reason.lower(), "message": gone.message, "step": gone.step,
                         "digest": gone.digest, "at_unix_s": gone.at_unix_s}
                        for gone in self.departures if gone.worker == each.worker
                    ]
                }
                for each in self.workers
            ],
            "halts": [halt_fields(halt) for halt in self.halts],
            "events": [event_fields(event) for event in self.events],
            "scalars": [each.fields() for each in self.scalars],
            "arithmetics": [
                asdict(each) | {"items": dict(each.items)} for each in self.arithmetics
            ],
            "one_arithmetic": self.one_arithmetic,
            "verified": asdict(self.verified),
            "slowness": [slow_fields(each) for each in self.slowness],
            "gaps": past.gaps,
            "last_gap_step": past.last_gap_step,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Everything that a journal says of one step."""

    run_id: str
    step: int
    records: list[tuple[JournalEntry, bool]]
    """Each record of the step, and whether it is the line's; others were rolled back."""
    halts: list[RecordedHalt]
    events: list[RunEvent]
    scalars: list[LoggedScalar]

    @classmethod
    def read(cls, folder: Path, step: int) -> StepFacts:
        """Reads one step from the journal in a run's folder.

        Raises:
            JournalError: there is no journal, or it can't be read.
            UsageError: it knows nothing of the step.
        """
        with reading(folder) as reader:
            run_id, last = reader.run().run_id, reader.steps()
            facts = cls(
                run_id=run_id,
                step=step,
                records=reader.step_records(step),
                halts=[each for each in reader.halts() if each.evidence.step == step],
                events=[each for each in reader.run_events() if each.step == step],
                scalars=[each for each in reader.scalars() if each.step == step],
            )
        if not (facts.records or facts.halts):
            known = f"its steps are 1 to {last}" if last else "it has none yet"
            raise UsageError(f"run {run_id} has no step {step}: {known}")
        return facts

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "run_id": self.run_id,
            "step": self.step,
            "records": [_record_fields(entry) | {"kept": kept} for entry, kept in self.records],
            "halts": [halt_fields(halt) for halt in self.halts],
            "events": [event_fields(event) for event in self.events],
            "scalars": [
                {"name": each.name, "worker": each.worker, "value": each.value}
                for each in self.scalars
            ],
        }


def find_folder(run: str, runs: Path = RUNS) -> Path:
    """The folder of a run, named by its id under `runs`, by its folder or its journal.

    Empty: the newest run.

    Raises:
        UsageError: there is none.
    """
    if not run:
        journals = sorted(
            runs.glob(f"*/{JOURNAL}"), key=lambda each: each.parent.stat().st_mtime_ns
        )
        if journals:
            return journals[-1].parent
        raise UsageError(f"there is no run under {runs}/ here: name a run, or its folder")
    for folder in (runs / run, Path(run)):
        if (folder / JOURNAL).is_file():
            return folder
    if Path(run).name == JOURNAL and Path(run).is_file():
        return Path(run).parent
    raise UsageError(
        f"there is no run {run}: neither an id under {runs}/ here nor a folder with a {JOURNAL}; "
        "`andon history` lists them"
    )


@contextmanager
def reading(folder: Path) -> Iterator[StepReader]:
    """Reads the journal in a folder.

    Raises:
        JournalError: there is none, or it can't be read.
    """
    journal = folder / JOURNAL
    with journal_errors(journal), StepReader(journal) as reader:
        yield reader


def event_fields(event: RunEvent) -> dict[str, Any]:
    """A run event for JSON."""
    return asdict(event) | {"kind": event.kind.value}


def _record_fields(entry: JournalEntry) -> dict[str, Any]:
    record, result = entry.record, entry.result
    assert result is not None
    return {
        "key": str(record.key),
        "parent": None if record.parent is None else str(record.parent),
        "epoch": result.epoch,
        "positions": [result.batch.start, result.batch.stop],
        "workers": list(record.roster),
        "loss": result.loss,
        "accuracy": accuracy_of(result.correct, result.samples),
        "correct": result.correct,
        "samples": result.samples,
        "weight": result.weight,
        "gradient_norm": result.gradient_norm,
        "overflow": result.overflow,
        "trimmed": result.trimmed,
        "attempt": result.attempt,
        "seconds": result.seconds,
        "stop_reason": result.stop_reason,
        "note": entry.note,
        "at_unix_s": entry.at_unix_s,
        "contributions": [
            {
                "worker": part.worker,
                "rank": part.rank,
                "samples": part.samples,
                "weight": part.weight,
                "loss": part.loss_sum / part.weight if part.weight else None,
                "positions": [[each.start, each.stop] for each in part.positions],
            }
            for part in result.contributions
        ],
    }
