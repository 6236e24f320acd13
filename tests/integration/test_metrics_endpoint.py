"""The endpoint of metrics answers while others are busy, and says what is wrong with its port."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from andon.host.metrics import MetricsApp, MetricsEndpoint
from andon_trainer.config import LineConfig
from andon_trainer.telemetry import Telemetry
from integration.harness import fetch

pytestmark = pytest.mark.integration


def test_the_endpoint_answers_while_the_event_loop_is_busy() -> None:
    async def busy() -> tuple[str, list[dict[str, Any]]]:
        with MetricsEndpoint("127.0.0.1", 0, MetricsApp(CollectorRegistry())) as endpoint:
            endpoint.discover("7f3a", lambda: {4: "10.0.0.7:9401"})
            url = endpoint.url("127.0.0.1")
            # The event loop's own thread waits for the answers, so another thread must give them.
            return fetch(url), json.loads(fetch(url.replace("/metrics", "/sd")))

    text, groups = asyncio.run(busy())

    assert text == ""
    assert groups[1:] == [{"targets": ["10.0.0.7:9401"], "labels": {"run": "7f3a", "worker": "4"}}]


def test_a_worker_that_listens_everywhere_is_found_where_it_reaches_the_coordinator() -> None:
    config = LineConfig(address="127.0.0.1:7070", metrics_bind="0.0.0.0")

    with closing(Telemetry(config)) as telemetry:
        assert telemetry.address.startswith("127.0.0.1:")
        assert "andon_worker_step" in fetch(f"http://{telemetry.address}/metrics")


def test_a_taken_port_is_refused_with_the_variable_to_change() -> None:
    with MetricsEndpoint("127.0.0.1", 0, MetricsApp(CollectorRegistry())) as endpoint:
        config = LineConfig(metrics_bind=f"127.0.0.1:{endpoint.port}")

        with pytest.raises(ValueError, match="ANDON_METRICS_BIND"):
            Telemetry(config)
