"""A worker's metrics: what a committed step adds, and where they are served."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon_trainer import Line
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Joining, StepReport, Timings
from andon_trainer.exchange.control.translation import join_to
from andon_trainer.exchange.path import Traffic
from andon_trainer.process.device import gpu_of
from andon_trainer.telemetry import PATHS, GpuReading, StepMeasured, Telemetry, WorkerMetrics

TIMED = {
    "andon_worker_step_seconds": 2.0,
    "andon_data_wait_seconds": 0.25,
    "andon_compute_seconds": 1.0,
    "andon_exchange_seconds": 0.5,
    "andon_exchange_wait_seconds": 0.125,
    "andon_commit_wait_seconds": 0.0625,
}


def openmetrics(registry: CollectorRegistry) -> bytes:
    """What a scraper gets that asks for OpenMetrics, as Prometheus does."""
    encode, _ = choose_encoder("application/openmetrics-text")
    return encode(registry)


class Metered:
    """Metrics, and what they show."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def moved(self) -> list[float | None]:
        return [
            self.value("andon_exchange_bytes_total", direction=direction, path="wire")
            for direction in ("up", "down")
        ]


def step(
    *, sent_bytes: int = 100, received_bytes: int = 90, timings: Timings | None = None
) -> StepMeasured:
    spent = timings or Timings(busy_s=1.0, exchange_s=0.5, wait_s=0.125, data_s=0.25)
    report = StepReport(key=Key(1, 1), loss_sum=3.0, weight=4.0, samples=4, timings=spent)
    return StepMeasured(
        report=report,
        step=7,
        seconds=2.0,
        commit_s=0.0625,
        traffic=Traffic.over("wire", sent_bytes, received_bytes),
    )


def test_everything_is_there_at_zero_from_the_start() -> None:
    metered = Metered()

    assert metered.value("andon_samples_total") == 0
    assert metered.value("andon_worker_step") == 0
    assert metered.value("andon_exchange_hidden_ratio") is None, "there was no exchange"
    assert metered.moved() == [0, 0]
    assert [metered.value(f"{name}_count") for name in TIMED] == [0] * len(TIMED)


def test_a_committed_step_adds_its_samples_and_times() -> None:
    metered = Metered()

    metered.metrics.committed(step())

    assert metered.value("andon_samples_total") == 4
    assert {name: metered.value(f"{name}_sum") for name in TIMED} == TIMED
    assert metered.value("andon_exchange_hidden_ratio") == 0.75


def test_bytes_are_counted_once_though_told_as_a_total() -> None:
    metered = Metered()

    metered.metrics.committed(step(sent_bytes=100, received_bytes=90))
    metered.metrics.committed(step(sent_bytes=350, received_bytes=180))

    assert metered.moved() == [350, 180]


def test_a_step_without_an_exchange_leaves_the_hidden_ratio() -> None:
    metered = Metered()
    metered.metrics.committed(step())

    metered.metrics.committed(step(timings=Timings(busy_s=1.0)))

    assert metered.value("andon_exchange_hidden_ratio") == 0.75


def test_the_path_of_the_last_exchange_is_shown_until_there_is_another() -> None:
    metered = Metered()

    def shown() -> dict[str, float | None]:
        return {path: metered.value("andon_exchange_path", path=path) for path in PATHS}

    assert shown() == {"wire": 0, "tcp": 0, "shared-memory": 0, "ring": 0}
    over_memory = Traffic.over("shared-memory", 100, 90)
    metered.metrics.committed(replace(step(), traffic=over_memory))
    assert shown() == {"wire": 0, "tcp": 0, "shared-memory": 1, "ring": 0}
    metered.metrics.committed(replace(step(), traffic=over_memory))  # Nothing was exchanged.
    assert shown() == {"wire": 0, "tcp": 0, "shared-memory": 1, "ring": 0}

    fell_back = over_memory + Traffic.over("wire", 100, 90) + Traffic(fallbacks=1)
    metered.metrics.committed(replace(step(), traffic=fell_back))

    assert shown() == {"wire": 1, "tcp": 0, "shared-memory": 0, "ring": 0}
    assert metered.value("andon_shared_memory_fallbacks_total") == 1


def test_faults_and_local_steps_are_counted_at_once() -> None:
    metered = Metered()

    metered.metrics.rejoins()
    metered.metrics.voided()
    metered.metrics.stepped_locally()

    for name in ("worker_rejoins", "worker_rounds_voided", "local_steps"):
        assert metered.value(f"andon_{name}_total") == 1


def test_a_slow_exchange_leads_to_its_step_by_an_exemplar() -> None:
    metered = Metered()

    metered.metrics.committed(step())

    text = openmetrics(metered.registry).decode()
    found = [line for line in text.splitlines() if ' # {step="7"}' in line]
    assert [line.partition("_bucket")[0] for line in found].count("andon_exchange_seconds") == 1
    assert len(found) == len(TIMED)


def test_segments_that_were_sent_again_are_counted_over_connections_that_come_and_go() -> None:
    registry = CollectorRegistry()
    read = iter(({7: 3}, {7: 5, 9: 1}, {9: 4}, {7: 2, 9: 4}, None))

    WorkerMetrics(registry, sent_again=lambda: next(read))

    name = "andon_worker_retransmitted_segments_total"
    counted = [registry.get_sample_value(name) for _ in range(5)]
    assert counted == [3, 6, 9, 11, None]


def test_a_gpu_is_read_at_each_scrape_and_absent_on_a_worker_without_one() -> None:
    registry, used = CollectorRegistry(), iter((100, 200, 300, 400))

    def read() -> GpuReading:
        now = next(used)
        memory = {"allocated": now, "peak": 400, "reserved": 512, "total": 1024}
        return GpuReading(memory_bytes=memory, utilization=None if now > 200 else 0.5)

    WorkerMetrics(registry, read)

    labels = {"kind": "allocated"}
    assert registry.get_sample_value("andon_gpu_memory_bytes", labels) == 100
    assert registry.get_sample_value("andon_gpu_utilization_ratio") == 0.5
    assert registry.get_sample_value("andon_gpu_utilization_ratio") is None, "it was not measured"
    assert registry.get_sample_value("andon_gpu_memory_bytes", {"kind": "total"}) == 1024
    assert Metered().value("andon_gpu_memory_bytes", kind="allocated") is None
    assert Metered().value("andon_gpu_utilization_ratio") is None


def test_a_cpu_has_no_gpu_to_read() -> None:
    assert gpu_of(torch.device("cpu")) is None


def test_the_step_is_asked_for_at_each_scrape() -> None:
    metered, steps = Metered(), iter((7, 9))

    metered.metrics.follow(lambda: next(steps))

    assert [metered.value("andon_worker_step") for _ in range(2)] == [7, 9]


def test_join_tells_where_the_metrics_are() -> None:
    joining = Joining(
        run_id="7f3a",
        incarnation=1,
        layout=Layout(()),
        plan=RunPlan(global_batch=1, dataset_size=8),
        node_id="alpha",
        launch_slot=None,
        device=("cpu", "", 0, 1),
        metrics_address="alpha:9401",
    )

    assert join_to(joining).metrics_address == "alpha:9401"


def test_a_worker_whose_metrics_are_off_has_no_address() -> None:
    telemetry = Telemetry(LineConfig(address="127.0.0.1:7070", metrics_bind="off"))

    assert telemetry.address == ""
    telemetry.close()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("0.0.0.0:9401", ("0.0.0.0", 9401)),
        ("alpha", ("alpha", 0)),
        ("[::1]:9401", ("::1", 9401)),
        ("[::]", ("::", 0)),
        ("off", None),
    ],
)
def test_the_environment_says_where_metrics_are_served(
    text: str, endpoint: tuple[str, int] | None
) -> None:
    config = LineConfig.read({"ANDON_METRICS_BIND": text})

    assert config.metrics_endpoint == endpoint


@pytest.mark.parametrize("text", [":9401", "alpha:beta", "alpha:99999", "http://alpha", "a@b:1"])
def test_a_place_that_makes_no_sense_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="ANDON_METRICS_BIND"):
        LineConfig.read({"ANDON_METRICS_BIND": text})


def test_solo_has_neither_endpoint_nor_thread() -> None:
    before = set(threading.enumerate())
    line = Line(device="cpu", metrics_bind="127.0.0.1")

    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=2)
    line.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

    assert set(threading.enumerate()) <= before
    line.close()
