"""The benchmarks run and write what they promise; how fast anything is, no test asks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import clean_environment

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_exchange_benchmark_writes_a_row_beside_its_machine(tmp_path: Path) -> None:
    out = tmp_path / "results" / "exchange.json"

    command = [sys.executable, str(BENCHMARKS / "exchange.py"), "--paths", "wire"]
    command += ["--workers", "2", "--mib", "1", "--pairs", "1", "--json", str(out)]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    figures = json.loads(out.read_text())
    assert figures.keys() == {"machine", "rows"}
    assert figures["machine"]["cores"] > 0
    (row,) = figures["rows"]
    low, high = row.pop("spread")
    ours_s, gloo_s, ratio = row.pop("ours_s"), row.pop("gloo_s"), row.pop("ratio")
    assert row == {"path": "wire", "workers": 2, "mib": 1, "encoding": "float32"}
    assert ours_s > 0
    assert gloo_s > 0
    assert low <= ratio <= high


@pytest.mark.parametrize(
    ("flag", "value"), [("--paths", "pigeon"), ("--workers", "1"), ("--mib", "many")]
)
def test_the_exchange_benchmark_refuses_what_it_can_not_measure(flag: str, value: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "exchange.py"), flag, value]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)

    assert ran.returncode == 2
    assert f"argument {flag}: " in ran.stderr
