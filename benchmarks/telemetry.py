"""What do metrics cost: of a step at the service and at a worker, and of a scrape?

One thread counts steps as the processes do: the coordinator's events and effects, a reducer's
chunks, and a worker's commit. Nothing else runs, so the thread's CPU time is all that a step pays
for its metrics. A scrape runs on a thread of its own; its CPU time counts too, since Python runs
one thread at a time.

    python benchmarks/telemetry.py --json benchmarks/results/telemetry.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import describe_machine
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from andon.host.telemetry import ExchangeDurations, RefusalCounter, new_registry
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects, events
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.telemetry import LineMetrics, Totals
from andon_reducer.core.effects import DataPath, Direction, FreeRound, RoundOutcome
from andon_reducer.telemetry import ReducerTelemetry
from andon_trainer.core.reports import StepReport, Timings
from andon_trainer.exchange.path import Traffic
from andon_trainer.telemetry import StepMeasured, WorkerMetrics

Happening = tuple[events.Event, Sequence[effects.Effect]]

PLAN = RunPlan(global_batch=64, dataset_size=6400)
FORMATS = {"text": "text/plain", "openmetrics": "application/openmetrics-text"}


@dataclass(frozen=True, slots=True)
class Service:
    """A service's metrics, with so many workers on the line."""

    registry: CollectorRegistry
    line: LineMetrics
    reducer: ReducerTelemetry
    core: LineCore


def service_of(workers: int) -> Service:
    """Metrics that all workers have joined."""
    registry = new_registry()
    refusals, exchanges = RefusalCounter(registry), ExchangeDurations(registry)
    reducer = ReducerTelemetry(registry, refusals, exchanges)
    line = LineMetrics(registry, Totals(), refusals, exchanges)
    settings = LineSettings(
        run_id="7f3a", expect_workers=workers, min_workers=workers, max_workers=workers
    )
    core = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    for worker in range(workers):
        request = events.JoinRequest(
            run_id="7f3a", incarnation=worker + 1, layout=Layout(()), plan=PLAN
        )
        joined = events.WorkerJoined(worker, request)
        line.observe(joined, core.receive(joined, 0.0), 0.0)
    return Service(registry, line, reducer, core)


def step_of(number: int, workers: int) -> list[Happening]:
    """What the coordinator sees of one step: requests for work, heartbeats, reports, the record."""
    key, roster, streams = Key(1, number), tuple(range(workers)), range(workers)
    batch = PositionRange(0, 64)
    assignment = effects.Assignment(
        key=key,
        parent=None,
        roster=roster,
        rank=0,
        step=number,
        attempt=0,
        epoch=0,
        positions=(batch,),
        batch=batch,
    )
    ready = events.Ready(
        key=key,
        loss_sum=2.0,
        weight=2.0,
        samples=2,
        total_weight=4.0,
        world_size=workers,
        timings=events.StepTimings(wait_s=0.002, exchange_s=0.006),
    )
    result = StepResult(
        epoch=0,
        batch=batch,
        loss=1.5,
        samples=64,
        weight=64.0,
        attempt=0,
        seconds=0.03,
        contributions=(),
    )
    record = Record(key, None, RecordKind.STEP, number, Cursor(0, 64), roster)
    happened: list[Happening] = [(events.WorkRequested(each, None), ()) for each in streams[1:]]
    assigned = [effects.Assign(each, assignment) for each in streams]
    happened.append((events.WorkRequested(0, None), assigned))
    for each in streams:
        answer = effects.SendHeartbeatAnswer(each, number)
        happened.append((events.HeartbeatArrived(each, number), (answer,)))
    happened += [(events.WorkerReady(each, ready), ()) for each in streams[1:]]
    happened.append((events.WorkerReady(0, ready), (effects.SaveRecord(record, result),)))
    sent = [effects.SendCommitted(each, record, result) for each in streams]
    happened.append((events.RecordSaved(key), sent))
    return happened


def coordinator_step(workers: int) -> Callable[[int], None]:
    """Counts the step of a number at the coordinator, with its write to the journal."""
    service = service_of(workers)
    made = {number: step_of(number, workers) for number in range(1, 501)}

    def count(number: int) -> None:
        for event, done in made[number]:
            service.line.observe(event, done, float(number))
        service.line.wrote(0.0002, number)

    return count


def reducer_step(workers: int, chunks: int) -> Callable[[int], None]:
    """Counts a round at the reducer: of each chunk what came from and went to every worker."""
    reducer = service_of(workers).reducer

    def count(number: int) -> None:
        for _ in range(chunks * workers):
            reducer.moved(Direction.UP, 2**20, DataPath.WIRE)
            reducer.moved(Direction.DOWN, 2**20, DataPath.WIRE)
        reducer.freed(FreeRound("7f3a", Key(1, number), RoundOutcome.FINISHED, (0.006,)))

    return count


def worker_step() -> Callable[[int], None]:
    """Counts a committed step at a worker."""
    metrics = WorkerMetrics(new_registry())
    totals = itertools.count(1000)
    spent = Timings(busy_s=0.02, exchange_s=0.006, wait_s=0.002, data_s=0.001)

    def count(number: int) -> None:
        report = StepReport(key=Key(1, number), loss_sum=3.0, weight=4.0, samples=4, timings=spent)
        traffic = Traffic.over("wire", next(totals), next(totals))
        metrics.committed(
            StepMeasured(report=report, step=number, seconds=0.03, commit_s=0.001, traffic=traffic)
        )

    return count


def status_tick(workers: int) -> Callable[[int], None]:
    """Sets the gauges to a status, as the service does twice a second."""
    service = service_of(workers)
    status = service.core.status(0.0)
    return lambda number: service.line.tick(status)


def scrape(registry: CollectorRegistry, kind: str) -> Callable[[int], None]:
    """Renders a registry."""
    encode, _ = choose_encoder(FORMATS[kind])

    def render(number: int) -> None:
        encode(registry)

    return render


def measure(act: Callable[[int], None], steps: int, repeats: int) -> dict[str, float]:
    """The thread's CPU time of one call, in microseconds: median and range over the repeats."""
    act(1)
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        for number in range(1, steps + 1):
            act(number)
        found.append((time.thread_time() - began) / steps * 1e6)
    return {
        "median": round(statistics.median(found), 1),
        "least": round(min(found), 1),
        "greatest": round(max(found), 1),
    }


def figures_of(steps: int, repeats: int) -> dict[str, object]:
    """All figures, in microseconds of CPU time."""
    figures: dict[str, object] = {"steps": steps, "repeats": repeats, "unit": "microseconds"}
    for workers in (2, 8, 64):
        service = service_of(workers)
        service.line.tick(service.core.status(0.0))
        figures[f"{workers}_workers"] = {
            "coordinator_step": measure(coordinator_step(workers), steps, repeats),
            "reducer_step_of_100_chunks": measure(reducer_step(workers, 100), steps // 5, repeats),
            "status": measure(status_tick(workers), steps // 5, repeats),
            "scrape_text": measure(scrape(service.registry, "text"), steps // 20, repeats),
            "scrape_openmetrics": measure(
                scrape(service.registry, "openmetrics"), steps // 20, repeats
            ),
        }
    registry = new_registry()
    WorkerMetrics(registry)
    figures["worker"] = {
        "step": measure(worker_step(), steps, repeats),
        "scrape_text": measure(scrape(registry, "text"), steps // 20, repeats),
        "scrape_openmetrics": measure(scrape(registry, "openmetrics"), steps // 20, repeats),
    }
    return figures


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of one repeat, from 20 to 500")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if not 20 <= options.steps <= 500:
        parser.error("--steps is from 20 to 500")
    figures = {"machine": describe_machine(), **figures_of(options.steps, options.repeats)}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
