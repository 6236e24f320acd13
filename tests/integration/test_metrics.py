"""Metrics: the values of a real run's endpoints are correct, and Prometheus can discover them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from andon.host.metrics import MetricsEndpoint
from andon.protocol.halts import HaltReason
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from andon_trainer.config import LineConfig
from andon_trainer.telemetry import Telemetry
from integration.harness import Service, Worker, on_line, start_line, start_worker

pytestmark = pytest.mark.integration

STEPS = 9
PAUSED, BAD, LOST, BACK = 3, 5, 7, 8
"""Steps at which worker 1 is slow; a loss is NaN; worker 1 is killed; worker 0 is slow."""
HELD_UP_S = 1.0
"""The minimum time that worker 0 waits for worker 1 at step `PAUSED`."""
_PATIENCE_S = 30.0

OF_THE_SERVICE = {
    "andon_line_state": {"state"},
    "andon_build_info": {"version"},
    "andon_allreduce_seconds_bucket": {"le"},
    "andon_jidoka_halts_total": {"reason"},
    "andon_step_loss": set(),
    "andon_step": set(),
    "andon_steps_committed_total": set(),
    "andon_step_seconds_bucket": {"le"},
    "andon_samples_committed_total": set(),
    "andon_workers": {"state"},
    "andon_worker_wait_seconds_sum": {"worker"},
    "andon_heartbeat_age_seconds": {"worker"},
    "andon_exchange_bytes_total": {"direction", "path"},
    "andon_step_attempts_total": {"cause"},
    "andon_recovery_seconds_bucket": {"le"},
    "andon_join_pause_seconds_bucket": {"le"},
    "andon_inflight_bytes": set(),
}
OF_A_WORKER = {
    "andon_build_info": {"version"},
    "andon_worker_step": set(),
    "andon_samples_total": set(),
    "andon_exchange_bytes_total": {"direction", "path"},
    "andon_exchange_hidden_ratio": set(),
    "andon_exchange_seconds_bucket": {"le"},
    "andon_exchange_wait_seconds_bucket": {"le"},
    "andon_compute_seconds_bucket": {"le"},
    "andon_data_wait_seconds_bucket": {"le"},
    "andon_commit_wait_seconds_bucket": {"le"},
    "andon_worker_step_seconds_bucket": {"le"},
}


@dataclass(frozen=True)
class Scrape:
    """The metrics of one endpoint."""

    text: str
    families: list[Metric]

    @classmethod
    def of(cls, url: str) -> Scrape:
        text = fetch(url)
        return cls(text, list(text_string_to_metric_families(text)))

    def labels_of(self, name: str) -> list[dict[str, str]]:
        return [s.labels for f in self.families for s in f.samples if s.name == name]

    def value(self, name: str, **labels: str) -> float:
        (value,) = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        ]
        return float(value)

    def shown(self, name: str, label: str) -> dict[str, float]:
        """A metric's nonzero values, by a label."""
        found = {each[label]: self.value(name, **each) for each in self.labels_of(name)}
        return {key: value for key, value in found.items() if value}


@dataclass(frozen=True)
class Stage:
    """All endpoints at one moment, and the journal's contents."""

    service: Scrape
    groups: list[dict[str, Any]]
    """The answer of `/sd`."""
    steps: int
    samples: int
    losses: list[float]
    halts: list[HaltReason]
    workers: dict[str, Scrape] = field(default_factory=dict)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def discovery(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(fetch(service.metrics_url.replace("/metrics", "/sd")))
    return found


def look(service: Service, reached: Callable[[Scrape, list[dict[str, Any]]], bool]) -> Stage:
    """All endpoints, once the service's match: some gauges are updated twice a second."""
    deadline = time.monotonic() + _PATIENCE_S
    while not reached(scrape := Scrape.of(service.metrics_url), discovery(service)):
        assert time.monotonic() < deadline, scrape.text
        time.sleep(0.05)
    # Once more: the gauges may have been moving while that was read.
    scrape, groups = Scrape.of(service.metrics_url), discovery(service)
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


def training(scrape: Scrape, groups: list[dict[str, Any]]) -> bool:
    """One worker's blocks have arrived, and the line waits for the other worker."""
    return (
        scrape.value("andon_line_state", state="running") == 1
        and scrape.value("andon_workers", state="live") == 2
        and scrape.value("andon_inflight_bytes") > 0
        and len(groups) == 3
    )


def state_is(name: str) -> Callable[[Scrape, list[dict[str, Any]]], bool]:
    return lambda scrape, _: scrape.value("andon_line_state", state=name) == 1


def waits_for(text: str) -> Callable[[pb.LineStatus], bool]:
    return lambda line: line.waiting_for == text


def halted(line: pb.LineStatus) -> bool:
    return line.state == pb.LINE_STATE_HALTED


def tell_story(
    service: Service, workers: list[Worker], restart: Callable[[], Worker], gates: Path
) -> Iterator[tuple[str, Stage]]:
    """A run with all kinds of events; returns its stages."""
    service.await_status(waits_for(f"workers 0, 1 to finish step {PAUSED}"))
    yield "paused", look(service, training)
    time.sleep(HELD_UP_S)
    (gates / "paused").touch()
    halt = service.await_status(halted).halt
    yield "halted", look(service, state_is("halted"))
    service.clear_halt(halt.id, pb.HALT_ANSWER_RETRY)
    service.await_status(waits_for(f"workers 0, 1 to finish step {LOST}"))
    workers[1].process.kill()
    yield "lost", look(service, state_is("forming"))
    workers.append(restart())
    service.await_status(waits_for(f"workers 0, 1 to finish step {BACK}"))
    yield "back", look(service, training)
    (gates / "back").touch()
    for worker in (workers[0], workers[2]):
        assert worker.wait() == 0, worker.output
    yield "complete", look(service, state_is("complete"))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("metrics")
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

        return dict(tell_story(service, workers, restart, folder))


def test_every_metric_of_the_service_is_there_with_its_labels(story: dict[str, Stage]) -> None:
    scrape = story["paused"].service

    for name, labels in OF_THE_SERVICE.items():
        found = scrape.labels_of(name)
        assert found, name
        assert all(each.keys() == labels for each in found), name


def test_every_metric_of_a_worker_is_there_with_its_labels(story: dict[str, Stage]) -> None:
    assert story["paused"].workers.keys() == {"0", "1"}
    for scrape in story["paused"].workers.values():
        for name, labels in OF_A_WORKER.items():
            found = scrape.labels_of(name)
            assert found, name
            assert all(each.keys() == labels for each in found), name


@pytest.mark.parametrize("name", ["paused", "halted", "lost", "back", "complete"])
def test_the_service_agrees_with_the_journal_to_the_unit(
    story: dict[str, Stage], name: str
) -> None:
    stage = story[name]

    steps = {
        **{"paused": PAUSED - 1, "halted": BAD - 1, "lost": LOST - 1, "back": BACK - 1},
        "complete": STEPS,
    }
    assert stage.steps == steps[name]
    assert stage.service.value("andon_steps_committed_total") == stage.steps
    assert stage.service.value("andon_step") == stage.steps
    assert stage.service.value("andon_step_seconds_count") == stage.steps
    assert stage.service.value("andon_samples_committed_total") == stage.samples
    assert stage.service.value("andon_step_loss") == stage.losses[-1]
    halts = {reason.label: float(stage.halts.count(reason)) for reason in stage.halts}
    assert stage.service.shown("andon_jidoka_halts_total", "reason") == halts


@pytest.mark.parametrize("name", ["paused", "halted"])
def test_the_workers_agree_with_the_journal_to_the_unit(story: dict[str, Stage], name: str) -> None:
    stage = story[name]

    for scrape in stage.workers.values():
        assert scrape.value("andon_worker_step") == stage.steps
        for timed in ("exchange", "exchange_wait", "compute", "data_wait", "commit_wait"):
            assert scrape.value(f"andon_{timed}_seconds_count") == stage.steps, timed
        assert scrape.value("andon_worker_step_seconds_count") == stage.steps
        assert 0 <= scrape.value("andon_exchange_hidden_ratio") <= 1
    given = [scrape.value("andon_samples_total") for scrape in stage.workers.values()]
    assert sum(given) == stage.samples


def test_parts_of_a_step_are_no_longer_than_the_step(story: dict[str, Stage]) -> None:
    for scrape in story["halted"].workers.values():
        whole = scrape.value("andon_worker_step_seconds_sum")
        parts = ("compute", "data_wait", "exchange_wait", "commit_wait")
        assert 0 < sum(scrape.value(f"andon_{part}_seconds_sum") for part in parts) <= whole


def test_bytes_are_those_that_the_workers_sent_and_received(story: dict[str, Stage]) -> None:
    for stage in (story["paused"], story["halted"]):
        for direction in ("up", "down"):
            everywhere = [
                {"direction": direction, "path": path} for path in ("wire", "shared-memory")
            ]
            seen = sum(
                stage.service.value("andon_exchange_bytes_total", **labels) for labels in everywhere
            )
            told = [
                sum(each.value("andon_exchange_bytes_total", **labels) for labels in everywhere)
                for each in stage.workers.values()
            ]
            assert all(each > 0 for each in told)
            assert sum(told) < seen  # the service also relayed state, and holds the next round


def test_what_the_reducer_holds_is_shown_and_let_go(story: dict[str, Stage]) -> None:
    held = [stage.service.value("andon_inflight_bytes") for stage in story.values()]

    assert held[0] > 0
    assert held[-1] == 0


def test_the_state_is_one_of_all(story: dict[str, Stage]) -> None:
    shown = {
        name: stage.service.shown("andon_line_state", "state") for name, stage in story.items()
    }

    assert shown == {
        "paused": {"running": 1},
        "halted": {"halted": 1},
        "lost": {"forming": 1},
        "back": {"running": 1},
        "complete": {"complete": 1},
    }


def test_workers_are_counted_and_their_heartbeats_aged_while_they_live(
    story: dict[str, Stage],
) -> None:
    def seen(name: str) -> tuple[dict[str, float], set[str]]:
        scrape = story[name].service
        ages = scrape.labels_of("andon_heartbeat_age_seconds")
        return scrape.shown("andon_workers", "state"), {each["worker"] for each in ages}

    assert seen("paused") == ({"live": 2, "participating": 2}, {"0", "1"})
    assert seen("lost") == ({"live": 1}, {"0"})
    assert seen("back") == ({"live": 2, "participating": 2}, {"0", "1"})
    assert seen("complete") == ({}, set())


def test_the_worker_that_the_others_wait_for_is_reported(story: dict[str, Stage]) -> None:
    before, after = story["paused"].service, story["halted"].service

    def waited(worker: str) -> float:
        name = "andon_worker_wait_seconds_sum"
        return after.value(name, worker=worker) - before.value(name, worker=worker)

    assert waited("0") >= HELD_UP_S
    assert 0 <= waited("1") < waited("0")
    for worker in ("0", "1"):
        assert after.value("andon_worker_wait_seconds_count", worker=worker) == BAD - 1


def test_attempts_are_counted_by_what_they_followed(story: dict[str, Stage]) -> None:
    attempts = story["complete"].service.shown("andon_step_attempts_total", "cause")

    assert attempts == {"first": STEPS, "halt": 1, "stream_lost": 1}


def test_pause_for_a_newcomer_is_timed(story: dict[str, Stage]) -> None:
    counts = [stage.service.value("andon_join_pause_seconds_count") for stage in story.values()]

    # Worker 1 receives rank 0's weights before step 1, and the line's after it was lost.
    assert counts == [1, 1, 1, 2, 2]
    assert story["back"].service.value("andon_join_pause_seconds_sum") > 0


def test_recovery_from_a_loss_is_timed(story: dict[str, Stage]) -> None:
    counts = [stage.service.value("andon_recovery_seconds_count") for stage in story.values()]

    assert counts == [0, 0, 0, 1, 1]
    assert story["back"].service.value("andon_recovery_seconds_sum") > 0


def test_every_committed_exchange_is_timed_once_its_round_is_freed(
    story: dict[str, Stage],
) -> None:
    counts = [
        story[name].service.value("andon_allreduce_seconds_count")
        for name in ("paused", "back", "complete")
    ]

    assert counts == [PAUSED - 1, BACK - 1, STEPS]


def test_workers_are_named_by_slots_that_are_bounded(story: dict[str, Stage]) -> None:
    named = {
        sample.labels["worker"]
        for stage in story.values()
        for scrape in (stage.service, *stage.workers.values())
        for family in scrape.families
        for sample in family.samples
        if "worker" in sample.labels
    }

    assert named == {"0", "1"}


def test_discovery_lists_the_service_and_every_live_worker(story: dict[str, Stage]) -> None:
    (service, first, second) = story["paused"].groups

    run = service["labels"]["run"]
    assert service["labels"] == {"run": run}
    assert first["labels"] == {"run": run, "worker": "0"}
    assert second["labels"] == {"run": run, "worker": "1"}
    targets = [target for group in story["paused"].groups for target in group["targets"]]
    assert len(set(targets)) == 3
    assert all(target.startswith("127.0.0.1:") for target in targets)


def test_discovery_drops_who_is_lost_and_who_left(story: dict[str, Stage]) -> None:
    assert story["lost"].groups == story["paused"].groups[:2]
    assert story["back"].groups[:2] == story["paused"].groups[:2]
    assert story["back"].groups[2]["labels"]["worker"] == "1"
    assert story["back"].groups[2] != story["paused"].groups[2]
    assert story["complete"].groups == story["paused"].groups[:1]


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_promtool_finds_nothing_to_object_to(story: dict[str, Stage]) -> None:
    for stage in story.values():
        for scrape in (stage.service, *stage.workers.values()):
            checked = subprocess.run(
                ["promtool", "check", "metrics"],
                input=scrape.text,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_endpoint_answers_while_the_event_loop_is_busy() -> None:
    async def busy() -> tuple[str, list[dict[str, Any]]]:
        with MetricsEndpoint("127.0.0.1", 0, CollectorRegistry()) as endpoint:
            endpoint.discover("7f3a", lambda: {4: "10.0.0.7:9401"})
            url = endpoint.url("127.0.0.1")
            # The event loop's own thread waits for the answers, so another thread must give them.
            return fetch(url), json.loads(fetch(url.replace("/metrics", "/sd")))

    text, groups = asyncio.run(busy())

    assert text == ""
    assert groups[1:] == [{"targets": ["10.0.0.7:9401"], "labels": {"run": "7f3a", "worker": "4"}}]


def test_nothing_else_is_served() -> None:
    with MetricsEndpoint("127.0.0.1", 0, CollectorRegistry()) as endpoint:
        url = endpoint.url("127.0.0.1").replace("/metrics", "/other")
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(url)
        refused.value.close()

    assert refused.value.code == 404


def test_a_worker_that_listens_everywhere_is_found_where_it_reaches_the_coordinator() -> None:
    config = LineConfig(address="127.0.0.1:7070", metrics_bind="0.0.0.0")

    with closing(Telemetry(config)) as telemetry:
        assert telemetry.address.startswith("127.0.0.1:")
        assert "andon_worker_step" in fetch(f"http://{telemetry.address}/metrics")


def test_a_taken_port_is_refused_with_the_variable_to_change() -> None:
    with MetricsEndpoint("127.0.0.1", 0, CollectorRegistry()) as endpoint:
        config = LineConfig(metrics_bind=f"127.0.0.1:{endpoint.port}")

        with pytest.raises(ValueError, match="ANDON_METRICS_BIND"):
            Telemetry(config)
