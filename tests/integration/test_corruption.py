"""A network between real processes that flips a bit of a gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.transport.reader import JournalReader
from chaos.lane_relay import DOWN, UP, LaneRelay
from chaos.rig import free_port
from integration.flipping import FlippingRelay, before_trailer
from integration.harness import Service, finish, start_workers, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SPEC: dict[str, Any] = {"samples": 40, "batch": 10, "steps": 6, "optimizer": "adamw"}


def test_the_step_is_tried_again_and_the_weights_are_those_of_a_sound_network(
    tmp_path: Path,
) -> None:
    expected = train(tmp_path / "sound", SPEC, 2)
    # Over gRPC a gradient from worker 0 is corrupted; over lanes one from worker 1, and an average
    # on its way there.
    tcp_port = free_port()
    with (
        Service(tmp_path / "run", 2, "--tcp-port", str(tcp_port), port=free_port()) as service,
        FlippingRelay(service.address, "up", before_trailer) as up,
        LaneRelay(service.address, tcp_port) as lanes,
    ):
        lanes.flips |= {UP, DOWN}
        each = [
            {"ANDON_ADDRESS": up.address, "ANDON_TCP": "off"},
            {"ANDON_ADDRESS": lanes.address, "ANDON_TCP": "on"},
        ]
        with start_workers(
            tmp_path, service, SPEC, 2, each=each, ANDON_SHARED_DIR="off"
        ) as workers:
            finish(workers)

    assert (up.flipped, lanes.flips) == (1, set())
    for worker in workers:
        assert worker.seen["digest"] == expected[0]["digest"]
        assert worker.seen["losses"] == expected[0]["losses"]
    # A worker that learns first that the round is void sends no report of its own.
    assert any("does not match its CRC-32C" in worker.output for worker in workers)
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.steps() == SPEC["steps"]
        assert sum(entry.result.attempt for entry in journal.chain() if entry.result) >= 1
