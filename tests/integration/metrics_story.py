"""One run with all kinds of events, for the tests of what can be seen of it from outside.

A worker is slow, a loss is NaN, a person answers the halt, a worker is killed and comes back. The
endpoints are read at each stage; Prometheus and Alertmanager, if they are here, watch all the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.protocol.halts import HaltReason
from andon_coordinator.transport.reader import JournalReader
from integration.harness import (
    Scrape,
    Service,
    Worker,
    fetch,
    finish,
    on_line,
    start_line,
    start_worker,
    wait_until,
)
from integration.watchers import Watchers

__all__ = [
    *("BACK", "BAD", "HELD_UP_S", "LOST", "PAUSED", "STEPS"),
    *("Stage", "Story", "tell"),
]

STEPS = 9
PAUSED, BAD, LOST, BACK = 3, 5, 7, 8
"""Steps at which worker 1 is slow; a loss is NaN; worker 1 is killed; worker 0 is slow."""
HELD_UP_S = 1.0
"""The minimum time that worker 0 waits for worker 1 at step `PAUSED`."""

Groups = list[dict[str, Any]]
"""The answer of `/sd`."""

Watch = Callable[[str, Service], None]
"""Called at each stage, in which the line stands still; it may take its time."""


@dataclass(frozen=True)
class Stage:
    """All endpoints at one moment, and the journal's contents."""

    service: Scrape
    groups: Groups
    steps: int
    samples: int
    losses: list[float]
    halts: list[HaltReason]
    workers: dict[str, Scrape] = field(default_factory=dict)


@dataclass
class Story:
    """What the endpoints said at each stage of the run, and who watched it."""

    stages: dict[str, Stage] = field(default_factory=dict)
    moments: dict[str, float] = field(default_factory=dict)
    """The time of day at the end of each stage that was watched."""
    run: str = ""
    watchers: Watchers | None = None
    """None: this machine has no Prometheus or no Alertmanager."""

    def watch(self, stage: str, service: Service) -> None:
        """Waits until those who watch have told what there is to tell at a stage."""
        watchers = self.watchers
        if watchers is None:
            return
        match stage:
            case "paused":
                return  # Prometheus does not run yet: the halt precedes its first scrape.
            case "halted":
                self.run = service.run_id
                watchers.watch(service)
                watchers.await_told("FIRING critical LineHalted", "FIRING critical LossNotFinite")
            case "resumed":
                watchers.await_told("RESOLVED LineHalted", "RESOLVED LossNotFinite")
            case "lost":
                watchers.await_told(
                    "FIRING warning WorkersBelowExpected", "FIRING warning WorkerSilent"
                )
            case "back":
                watchers.await_told("RESOLVED WorkersBelowExpected", "RESOLVED WorkerSilent")
            case "complete":
                watchers.await_found('andon_line_state{state="complete"} == 1')
        self.moments[stage] = time.time()


def tell(folder: Path, watch: Watch) -> dict[str, Stage]:
    """Runs the story in `folder`; returns its stages."""
    spec = {
        **{"samples": 40, "batch": 8, "steps": STEPS},
        "bad_loss": {"slot": 0, "step": BAD},
        "pauses": [
            {"slot": 1, "step": PAUSED, "until": str(folder / "paused")},
            {"slot": 1, "step": LOST, "until": str(folder / "never")},
            {"slot": 0, "step": BACK, "until": str(folder / "back")},
        ],
    }
    needs_all = ("--min-workers", "2")
    with start_line(folder, spec, 2, *needs_all, ANDON_ON_HALT="wait") as (service, workers):

        def restart() -> Worker:
            return start_worker(folder, {**spec, "pauses": []}, slot=1, **on_line(service, 1, 2))

        stages = {}
        for name, stage in _stages(service, workers, restart, folder):
            stages[name] = stage
            watch(name, service)
        return stages


def _stages(
    service: Service, workers: list[Worker], restart: Callable[[], Worker], gates: Path
) -> Iterator[tuple[str, Stage]]:
    service.await_waiting_for(f"workers 0, 1 to finish step {PAUSED}")
    # Worker 1 may have asked for its work while it still counts the step before.
    wait_until((gates / "paused.here").exists)
    yield "paused", _look(service, _training)
    time.sleep(HELD_UP_S)
    (gates / "paused").touch()
    halt = service.await_halt()
    yield "halted", _look(service, _state_is("halted"))
    service.clear_halt(halt.id)
    service.await_waiting_for(f"workers 0, 1 to finish step {LOST}")
    yield "resumed", _look(service, _training)
    workers[1].process.kill()
    yield "lost", _look(service, _state_is("forming"))
    workers.append(restart())
    service.await_waiting_for(f"workers 0, 1 to finish step {BACK}")
    yield "back", _look(service, _training)
    (gates / "back").touch()
    finish([workers[0], workers[2]])
    yield "complete", _look(service, _state_is("complete"))


def _look(service: Service, reached: Callable[[Scrape, Groups], bool]) -> Stage:
    """All endpoints, once the service's match: some gauges are updated twice a second."""
    wait_until(lambda: reached(service.scrape(), _discovery(service)))
    # Once more: the gauges may have been moving while that was read.
    scrape, groups = service.scrape(), _discovery(service)
    with JournalReader(service.journal) as journal:
        return Stage(
            service=scrape,
            groups=groups,
            steps=journal.steps(),
            samples=journal.samples(),
            losses=journal.losses(),
            halts=[halt.evidence.reason for halt in journal.halts()],
            workers={
                group["labels"]["worker"]: Scrape.of(f"http://{group['targets'][0]}/metrics")
                for group in groups
                if "worker" in group["labels"]
            },
        )


def _discovery(service: Service) -> Groups:
    found: Groups = json.loads(fetch(service.metrics_url.replace("/metrics", "/sd")))
    return found


def _training(scrape: Scrape, groups: Groups) -> bool:
    """One worker's blocks have arrived, and the line waits for the other worker."""
    return (
        scrape.value("andon_line_state", state="running") == 1
        and scrape.value("andon_workers", state="live") == 2
        and scrape.value("andon_inflight_bytes") > 0
        and len(groups) == 3
    )


def _state_is(name: str) -> Callable[[Scrape, Groups], bool]:
    return lambda scrape, _: scrape.value("andon_line_state", state=name) == 1
