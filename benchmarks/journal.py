"""How large and how fast is the journal of a month-long run?

It writes `--steps` steps with `--workers` contributions each through the coordinator's own store.
Then it times what a start, a status, a history and a report read. The store commits one transaction
per step. A million of them would only measure the disk, so most steps share a transaction, with the
same statements. The first `--single` steps measure the cost of one transaction per step.

    python benchmarks/journal.py --json benchmarks/results/journal.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine

from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import cursor_after, next_batch, shard_of
from andon_coordinator.core.effects import SaveRecord, SaveRun
from andon_coordinator.core.step_results import StepContribution, StepResult
from andon_coordinator.transport.journal import Journal
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.store import JournalStore
from andon_server.book import RunBook, outcomes_of

TERM = (1_800_000_000 << 32) + 12345
BATCH = 64
DATASET = 1_281_167
PER_TRANSACTION = 5_000


def records(steps: int, workers: int) -> Iterator[SaveRecord]:
    """A run's records: losses and times with all their digits, and an epoch every 20 000 steps."""
    head = Key(TERM, 1)
    roster = tuple(range(workers))
    yield SaveRecord(Record(head, None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,)))
    cursor = Cursor(0, 0)
    for step in range(1, steps + 1):
        batch = next_batch(cursor, BATCH, DATASET)
        loss = 2.0 + 1.0 / (step + 0.7)
        parts = tuple(_part(batch, rank, workers, loss) for rank in roster)
        result = StepResult(
            epoch=cursor.epoch, batch=batch, loss=loss, samples=len(batch),
            weight=float(len(batch)), attempt=0, seconds=0.1 + 1.0 / (step + 3.3),
            contributions=parts, gradient_norm=0.5 + loss / 7.0,
        )  # fmt: skip
        cursor = cursor_after(cursor, batch, DATASET)
        key = Key(TERM, step + 1)
        yield SaveRecord(Record(key, head, RecordKind.STEP, step, cursor, roster), result)
        head = key


def _part(batch: PositionRange, rank: int, workers: int, loss: float) -> StepContribution:
    share = shard_of(batch, rank, workers)
    samples = len(share)
    return StepContribution(
        worker=rank, rank=rank, positions=(share,), samples=samples, weight=float(samples),
        loss_sum=samples * loss * (1.0 + 0.01 * rank),
    )  # fmt: skip


def write(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Writes the run; returns the time of a one-step transaction, and the total time."""
    store = JournalStore(path, "bench", sync="normal", clock=time.time)
    store.begin_term(TERM)
    parameter = Component("weight", (1024, 1024))
    layout = Layout((Block(BlockKind.OTHER, "block", (parameter,)),))
    store.save_run(SaveRun(RunPlan(global_batch=BATCH, dataset_size=DATASET), layout))
    began, single = time.perf_counter(), []
    batch: list[SaveRecord] = []
    for number, effect in enumerate(records(options.steps, options.workers)):
        if number < options.single:
            before = time.perf_counter()
            store.save_record(effect)
            single.append(time.perf_counter() - before)
            continue
        batch.append(effect)
        if len(batch) == PER_TRANSACTION:
            _save_together(store, batch)
            batch.clear()
    _save_together(store, batch)
    seconds = time.perf_counter() - began
    store.close()
    return {
        "one_transaction_a_step_ms": round(statistics.median(single) * 1e3, 3) if single else None,
        "written_in_s": round(seconds, 1),
    }


def _save_together(store: JournalStore, batch: list[SaveRecord]) -> None:
    """Runs the store's own statements in one transaction, instead of one for each step."""
    own = store._own_transaction
    with own():
        store._own_transaction = nullcontext  # type: ignore[method-assign,assignment]
        try:
            for effect in batch:
                store.save_record(effect)
        finally:
            store._own_transaction = own  # type: ignore[method-assign]


def read(path: Path, repeats: int) -> dict[str, float]:
    """The median time of each read of a run, in milliseconds."""

    def open_and_start() -> None:
        journal = Journal.open(path, "bench")
        journal.counts()
        journal.close()

    def recover() -> None:
        with _store(path) as store:
            store.past.history()

    def count() -> None:
        with _store(path) as store:
            store.past.counts()

    def head() -> None:
        with JournalReader(path) as reader:
            reader.steps()

    return {
        "coordinator_start_ms": _median_ms(open_and_start, repeats),
        "open_and_history_ms": _median_ms(recover, repeats),
        "open_and_counts_ms": _median_ms(count, repeats),
        "open_and_head_ms": _median_ms(head, repeats),
        "andon_history_ms": _median_ms(lambda: RunBook.read(path), repeats),
        "losses_of_all_steps_ms": _median_ms(lambda: outcomes_of(path), 1),
    }


@contextmanager
def _store(path: Path) -> Iterator[JournalStore]:
    store = JournalStore(path, "bench", sync="normal", clock=time.time)
    try:
        yield store
    finally:
        store.close()


def _median_ms(act: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 2)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Writes and reads one journal; returns the figures."""
    path = folder / "journal.sqlite"
    written = write(path, options)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "steps": options.steps,
        "contributions_a_step": options.workers,
        "bytes": size,
        "bytes_per_step": round(size / options.steps, 1),
        **written,
        **read(path, options.repeats),
    }


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--single", type=int, default=1000, help="steps with their own transaction")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        figures = {"machine": describe_machine(), **measure(options, Path(folder))}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
