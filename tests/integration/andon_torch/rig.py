"""Starts `forked.py`: scenarios with real ranks, and what became of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from integration.harness import clean_environment

HERE = Path(__file__).parent

__all__ = ["LEASE_S", "Outcome", "in_trouble", "run_all"]

LEASE_S = 5.0
"""A busy machine may keep a rank from its reports for seconds."""

Outcome = dict[str, Any]
"""What became of one rank: `result`, or `error`, `type` and `at`; and `exit`. See `forked.py`."""


def run_all(*specs: dict[str, Any], lease_s: float = LEASE_S) -> list[list[Outcome]]:
    """Runs scenarios one after the other; for each the outcomes of its ranks."""
    done = subprocess.run(
        [sys.executable, str(HERE / "forked.py"), str(lease_s)],
        input=json.dumps(specs),
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


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
