"""A tensor far larger than a message is sent in chunks, and the service never holds all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.protocol.limits import CHUNK_ELEMENTS
from integration.harness import Service, finish, start_workers
from integration.strangers import resident_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WORKERS, STEPS, ROWS = 2, 1, 72
ELEMENTS = ROWS * 2**20
"""300 MB of float32 in one tensor."""
CHUNK_BYTES = 4 * CHUNK_ELEMENTS
CHUNKS_A_WORKER = 64
"""The bound in docs/architecture.md: chunks held per worker, independent of the model's size."""


def test_c_wire_002_a_tensor_of_300_mb_passes_and_the_service_holds_a_few_chunks_of_it(
    tmp_path: Path,
) -> None:
    spec = {"rows": ROWS, "steps": STEPS}
    with Service(tmp_path / "run", WORKERS, shared_dir="off") as service:
        idle = resident_bytes(service.process.pid)
        with start_workers(tmp_path, service, spec, WORKERS, script="huge.py") as workers:
            seen = finish(workers)
        most = resident_bytes(service.process.pid, most=True)

    assert [each["step"] for each in seen] == [STEPS] * WORKERS
    assert [(each["elements"], each["wrong"]) for each in seen] == [(ELEMENTS, 0)] * WORKERS
    assert most - idle < CHUNKS_A_WORKER * CHUNK_BYTES * WORKERS < 4 * ELEMENTS
