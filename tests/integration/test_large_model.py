"""A tensor far larger than a message is sent in chunks, and the service never holds all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.protocol.limits import CHUNK_ELEMENTS
from integration.harness import Service, finish, start_workers
from integration.strangers import resident_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WORKERS, STEPS, BATCH = 2, 2, 4
ELEMENTS = 75_000_000
"""300 MB of float32 in one tensor."""
CHUNK_BYTES = 4 * CHUNK_ELEMENTS
CHUNKS_A_WORKER = 64
"""The bound in docs/architecture.md: chunks held per worker, independent of the model's size."""


def test_c_wire_002_a_tensor_of_300_mb_passes_and_the_service_holds_a_few_chunks_of_it(
    tmp_path: Path,
) -> None:
    spec = {"elements": ELEMENTS, "steps": STEPS, "batch": BATCH}
    with Service(tmp_path / "run", WORKERS, shared_dir="off") as service:
        idle = resident_bytes(service.process.pid)
        with start_workers(tmp_path, service, spec, WORKERS, script="large.py") as workers:
            seen = finish(workers)
        most = resident_bytes(service.process.pid, most=True)

    assert [each["step"] for each in seen] == [STEPS] * WORKERS
    assert len({each["digest"] for each in seen}) == 1
    # Positions 0 to 3 have gradients 1 to 4, so each step moves every element by 0.5 * 2.5.
    assert seen[0]["ends"] == [-1.25 * STEPS] * 2
    assert most - idle < CHUNKS_A_WORKER * CHUNK_BYTES * WORKERS < 4 * ELEMENTS
