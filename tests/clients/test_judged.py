"""The judge of clients tests each client in another language."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients.languages import built, every_language
from integration.harness import clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NOT_SPOKEN = {
    *("encoding.encoding", "encoding.payload", "encoding.averages"),
    *("strips.encoding", "strips.payload", "strips.codes", "strips.averages"),
    *("lanes.proof", "lanes.frames", "lanes.averages", "lanes.broken", "lanes.answer"),
}
"""The checks of bfloat16 and of int8, which the clients refuse with a message, and of TCP lanes,
which they do not ask for."""


@every_language
def test_the_judge_finds_nothing_wrong_with_a_client(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "andon_cli", "conformance", "judge", "--format", "json", "--"]
    done = subprocess.run(
        [*command, *built(name).run],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout
    told: dict[str, Any] = json.loads(done.stdout)
    skipped = {each["name"] for each in told["checks"] if each["outcome"] == "skipped"}
    assert len(told["checks"]) > 80
    assert skipped <= NOT_SPOKEN, "whatever else is skipped was not judged"
