"""Each client in another language trains with a Python worker, through faults."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from clients.languages import built, every_language
from clients.rig import mixed_line

# The first test of a language builds its client; on a slow machine that takes minutes.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@every_language
def test_a_client_computes_what_the_conformance_vectors_say(name: str) -> None:
    done = subprocess.run(
        built(name).check, check=False, capture_output=True, text=True, timeout=500
    )

    assert done.returncode == 0, done.stdout + done.stderr


@every_language
def test_a_client_bootstraps_a_line_and_sends_its_state_to_a_restarted_python_worker(
    tmp_path: Path, name: str
) -> None:
    with mixed_line(tmp_path, 2, 30, "--min-workers", "2") as line:
        line.start(0, name)
        line.start(1, "python", hold_at="12")
        line.await_step(11)
        line.processes[1].kill()
        line.await_live(1)
        line.start(1, "python")
        end = line.ended_alike()

    chain = line.judge()
    assert end["step"] == 30
    assert chain[0].record.roster == (0,)
    assert all(entry.record.roster == (0, 1) for entry in chain[1:])


@every_language
def test_a_client_goes_on_after_a_halt_and_after_its_coordinator_was_killed(
    tmp_path: Path, name: str
) -> None:
    with mixed_line(tmp_path, 2, 30, "--min-workers", "2") as line:
        line.start(0, "python", hold_at="10,20")
        client = line.start(1, name)
        line.await_step(9)
        halt = line.halt()
        line.go(10)
        line.service.clear_halt(halt, pb.HALT_ANSWER_RETRY)
        line.await_step(19)
        line.service.process.kill()
        line.service.process.wait(60)
        line.serve()
        line.go(20)
        end = line.ended_alike()

    chain = line.judge()
    assert end["step"] == 30
    assert chain[0].record.roster == (0,)
    assert "resumed" in client.errors.read_text()
    assert "joining again" in client.errors.read_text()
