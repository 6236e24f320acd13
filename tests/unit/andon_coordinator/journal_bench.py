"""Journals for tests: what is written into one, and who writes it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects, events
from andon_coordinator.core.settings import History
from andon_coordinator.core.step_results import StepContribution
from andon_coordinator.transport.journal import (
    Journal,
)
from scenarios import line_values

TERM = 2**63 + 5  # beyond SQLite's integers
PLAN = RunPlan(global_batch=4, dataset_size=10, seed=2**64 - 1, total_epochs=2)
LAYOUT = Layout(
    (
        Block(BlockKind.LM_HEAD, "head", (Component("head.weight", (3, 4), DType.BFLOAT16),)),
        Block(BlockKind.OTHER, "rest", (Component("scale", ()),)),
    )
)
INITIAL = Record(Key(TERM, 1), None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,))
STEP = Record(Key(TERM, 4), INITIAL.key, RecordKind.STEP, 1, Cursor(0, 4), (0, 2))
RESULT = line_values.result(
    loss=0.1,
    attempt=2,
    seconds=0.25,
    contributions=(
        line_values.contribution(
            positions=(PositionRange(0, 2), PositionRange(3, 4)),
            samples=3,
            weight=3.0,
            loss_sum=0.3,
        ),
        StepContribution(
            worker=2, rank=1, positions=(PositionRange(2, 3),), samples=1, weight=1.0, loss_sum=0.1
        ),
    ),
    stop_reason="steps",
    correct=3,
)
HALT = HaltEvidence(
    id=2**52 - 1,
    reason=HaltReason.NON_FINITE_GRADIENT,
    step=2,
    key=Key(TERM, 5),
    worker=2,
    block=0,
    parameter="head.weight",
    element=(2, 1),
    value="nan",
    message="worker 2 sent nan",
    at_unix_s=12.5,
)


class Writing:
    """A started journal, and what it reports."""

    def __init__(
        self, path: Path, term: int = TERM, clock: Callable[[], float] = lambda: 100.0
    ) -> None:
        self.journal = Journal.open(path, "7f3a", clock=clock)
        self.journal.begin_term(term)
        self.reports: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.deposed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.journal.start(self.reports.put, self.deposed.put)

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def save(
        self, *changes: effects.SaveRecord | effects.SaveTerm | effects.SaveScalars
    ) -> list[events.Event]:
        """Saves, and waits for one report each."""
        for change in changes:
            self.journal.save(change)
        return [self.reports.get(timeout=10) for _ in changes]


def reopened(path: Path) -> History:
    journal = Journal.open(path, "7f3a")
    journal.close()
    return journal.history


def long_run(path: Path, steps: int) -> None:
    """A journal of so many steps, each with its number as its loss and norm."""
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        head = INITIAL.key
        for step in range(1, steps + 1):
            record = Record(
                Key(TERM, 10 + step), head, RecordKind.STEP, step, Cursor(0, 4 * step), (0, 2)
            )
            result = replace(RESULT, loss=float(step), gradient_norm=float(step))
            writing.save(effects.SaveRecord(record, result))
            head = record.key
