"""A worker's metrics: what a committed step adds, and where they are served."""

from __future__ import annotations

import threading

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon_trainer import Line
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import Joining, StepReport, Timings
from andon_trainer.exchange.path import Traffic
from andon_trainer.exchange.translation import join_to
from andon_trainer.telemetry import StepMeasured, Telemetry, WorkerMetrics

TIMED = {
    "andon_worker_step_seconds": 2.0,
    "andon_data_wait_seconds": 0.25,
    "andon_compute_seconds": 1.0,
    "andon_exchange_seconds": 0.5,
    "andon_exchange_wait_seconds": 0.125,
    "andon_commit_wait_seconds": 0.0625,
}


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

    assert set(threading.enumerate()) == before
    line.close()
