"""The benchmarks of schedules run and write their rows. No test depends on the speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.harness import benchmark_in_small, clean_environment

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@benchmark_in_small
def test_uneven_workers_are_compared_with_what_they_reach_alone(tmp_path: Path) -> None:
    batches, batch = 4, 3 * 2
    flags = ["--batches", str(batches), "--batch", "2", "--repeats", "1", "--phase-s", "1"]

    figures = _measured("uneven.py", tmp_path, ["--schedules", "equal", *flags, "--cores", "0.5"])

    ideal, equal = figures["rows"]
    assert (ideal["schedule"], ideal["of_ideal"]) == ("ideal", 1.0)
    assert equal["schedule"] == "equal"
    assert equal["seconds"] * equal["of_ideal"] == pytest.approx(ideal["seconds"], rel=1e-2)
    assert [sum(window["samples"]) for window in equal["windows"]] == [batch] * batches


@benchmark_in_small
@pytest.mark.netns
def test_two_hosts_with_a_thin_network_tell_how_much_of_their_time_they_compute(
    tmp_path: Path,
) -> None:
    flags = ["--mbit", "200", "--schedules", "every-step", "--batch", "2", "--phase-s", "1"]

    figures = _measured("thin.py", tmp_path, flags)

    (row,) = figures["rows"]
    assert (row["mbit"], row["schedule"]) == (200, "every-step")
    assert 0 < row["utilisation"] < 1.05
    # A float32 for each parameter, there and back; four samples share that.
    assert row["bytes_per_sample"] > 2 * 4 * 400_000 / 4


@benchmark_in_small
def test_a_schedule_is_compared_with_one_process_over_the_same_samples(tmp_path: Path) -> None:
    remedy = "needs scikit-learn: .venv/bin/python -m pip install -c constraints.txt --group bench"
    pytest.importorskip("sklearn", reason=remedy)
    flags = ["--tasks", "digits", "--schedules", "every-step", "--seeds", "1", "--batches", "5"]

    figures = _measured("convergence.py", tmp_path, flags)

    solo, line = figures["rows"]
    assert (solo["schedule"], solo["from_solo"]) == ("solo", 0.0)
    assert (line["task"], line["schedule"], line["samples"]) == ("digits", "every-step", 5 * 48)
    # BatchNorm averages over a worker's share in place of the batch, so the losses differ a little.
    assert abs(line["from_solo"]) < 0.3
    first_alone, first_together = (row["curves"][0][0] for row in (solo, line))
    assert first_alone == pytest.approx(first_together)


@benchmark_in_small
def test_an_encoding_is_compared_with_float32_over_the_same_samples(tmp_path: Path) -> None:
    flags = ["--rows", "float32,int8", "--seeds", "1", "--batches", "3", "--batch", "4"]

    figures = _measured("narrow.py", tmp_path, flags)

    float32, int8 = figures["rows"]
    assert (float32["encoding"], float32["percent"]) == ("float32", 0.0)
    assert (int8["base"], int8["samples"], int8["commits"]) == ("float32", 3 * 4, 3)
    assert abs(int8["percent"]) < 5
    assert int8["curves"][0][0] == float32["curves"][0][0], "the same model, untrained"


@pytest.mark.parametrize(
    ("flag", "value"), [("--schedules", "pigeon"), ("--repeats", "0"), ("--cores", "0")]
)
def test_what_can_not_be_measured_is_refused(flag: str, value: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "uneven.py"), flag, value]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)

    assert ran.returncode == 2
    assert flag in ran.stderr


def _measured(script: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    """What a benchmark wrote; skips where the machine lacks what it needs."""
    out = folder / "results" / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), *flags, "--json", str(out)]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    if ran.returncode == 1 and ran.stderr.startswith(f"{script}: "):
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    assert figures.keys() == {"machine", "rows"}
    return figures
