"""What a worker that finds no coordinator reads in its run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from andon_trainer.exchange import connection

COMPLETE = {"run_id": "7f3a", "complete_at_unix_s": 100.0}


@pytest.mark.parametrize(
    ("content", "run_id", "started_at", "expected"),
    [
        (COMPLETE, "7f3a", 99.0, True),
        (COMPLETE, "", 99.0, True),
        (COMPLETE, "7f3a", 101.0, False),
        (COMPLETE, "48bc", 99.0, False),
        ({"run_id": "7f3a", "complete_at_unix_s": 0.0}, "7f3a", 99.0, False),
        ({"run_id": "7f3a"}, "7f3a", 99.0, False),
        ({"run_id": "7f3a", "complete_at_unix_s": "soon"}, "7f3a", 99.0, False),
        ([COMPLETE], "7f3a", 99.0, False),
        (None, "7f3a", 99.0, False),
    ],
    ids=[
        "complete", "run-not-named", "before-this-process-began", "another-run", "not-complete",
        "older-service", "no-number", "no-object", "no-file",
    ],
)  # fmt: skip
def test_a_run_counts_as_complete_if_its_service_completed_it_since_this_process_began(
    tmp_path: Path, content: Any, run_id: str, started_at: float, *, expected: bool
) -> None:
    if content is not None:
        (tmp_path / "service.json").write_text(json.dumps(content))

    found = connection._completed_since(tmp_path, run_id, started_at)

    assert found is expected


def test_a_process_began_before_now_and_not_before_the_tests_were_written() -> None:
    began = connection._process_began_at()

    assert 1.7e9 < began <= time.time()
