"""Starts `forked.py`: scenarios with real ranks, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from integration.harness import Service, clean_environment
from integration.nursery import nursery

HERE = Path(__file__).parent

__all__ = ["LEASE_S", "Outcome", "in_trouble", "run_all"]

LEASE_S = 5.0
"""A busy machine may keep a rank from its reports for seconds."""
_PATIENCE_S = 600.0

Outcome = dict[str, Any]
"""What became of one rank: `result`, or `error`, `type` and `at`; and `exit`. See `forked.py`."""


def run_all(*specs: dict[str, Any], lease_s: float = LEASE_S) -> list[list[Outcome]]:
    """Runs scenarios one after the other; for each the outcomes of its ranks."""
    with (
        TemporaryDirectory(prefix="andon-scenarios-") as folder,
        Service(Path(folder, "run"), 1, "--liveness", str(lease_s)) as service,
    ):
        written, output, errors = (Path(folder, name) for name in ("specs.json", "out", "err"))
        written.write_text(json.dumps(specs))
        command = [str(HERE / "forked.py"), service.address, str(written)]
        environment = clean_environment(SERVICE_PID=str(service.process.pid))
        process = nursery("trainer").start(command, environment, output, errors)
        try:
            code = process.wait(_PATIENCE_S)
        finally:
            process.kill()
        assert code == 0, errors.read_text()[-4000:]
        return [json.loads(line) for line in output.read_text().splitlines()]


def in_trouble(
    cases: Iterable[tuple[str, str]], lease_s: float = LEASE_S
) -> dict[tuple[str, str], list[Outcome]]:
    """What becomes of three ranks when one of them acts in a call, for each act and call."""
    listed = list(cases)
    specs = [
        {
            "scenario": "trouble",
            "ranks": 3,
            "backend": "andon",
            "arguments": {"act": act, "place": place},
        }
        for act, place in listed
    ]
    return dict(zip(listed, run_all(*specs, lease_s=lease_s), strict=True))
