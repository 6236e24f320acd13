"""The benchmarks of schedules run and write their rows. No test depends on the speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.fixtures.benchmarks import benchmark_in_small, measured

pytestmark = pytest.mark.integration


@benchmark_in_small
def test_uneven_workers_are_compared_with_what_they_reach_alone(tmp_path: Path) -> None:
    batches, batch = 4, 3 * 2
    flags = ["--batches", str(batches), "--batch", "2", "--repeats", "1", "--phase-s", "1"]

    figures = measured(tmp_path, "uneven.py", "--schedules", "equal", *flags, "--cores", "0.5")

    ideal, equal = figures["rows"]
    assert (ideal["schedule"], ideal["of_ideal"]) == ("ideal", 1.0)
    assert equal["schedule"] == "equal"
    assert equal["seconds"] * equal["of_ideal"] == pytest.approx(ideal["seconds"], rel=1e-2)
    assert [sum(window["samples"]) for window in equal["windows"]] == [batch] * batches


@benchmark_in_small
def test_a_line_with_stragglers_is_compared_with_what_its_workers_reach_alone(
    tmp_path: Path,
) -> None:
    small = ["--windows", "3", "--local-steps", "2", "--batch", "2", "--phase-s", "1"]
    flags = ["--repeats", "1", "--stall-s", "0.2", "--each-s", "1", "--cores", "0.5", *small]

    figures = measured(tmp_path, "stragglers.py", "--schedules", "async", *flags)

    (row,) = figures["rows"]
    assert (row["schedule"], row["repeats"]) == ("async", 1)
    assert row["records"] >= 3
    assert 0 < row["of_ideal"] < 1.1


@benchmark_in_small
@pytest.mark.netns
def test_two_hosts_with_a_thin_network_tell_how_much_of_their_time_they_compute(
    tmp_path: Path,
) -> None:
    flags = ["--mbit", "200", "--schedules", "every-step", "--batch", "2", "--phase-s", "1"]

    figures = measured(tmp_path, "thin.py", *flags)

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

    figures = measured(tmp_path, "convergence.py", *flags)

    solo, line = figures["rows"]
    assert (solo["schedule"], solo["loss_over_synchronous"]) == ("solo", 0.0)
    assert (line["task"], line["schedule"], line["samples"]) == ("digits", "every-step", 5 * 48)
    assert (line["model"], line["seeds"]) == ("cnn", 1)
    # A float32 for each parameter, there and back, and BatchNorm's statistics.
    assert 0.4 < line["bytes_ratio"] <= 1
    # BatchNorm averages over a worker's share in place of the batch, so the losses differ a little.
    assert abs(line["from_solo"]) < 0.3
    first_alone, first_together = (row["curves"][0][0] for row in (solo, line))
    assert first_alone == pytest.approx(first_together)


@benchmark_in_small
def test_an_encoding_is_compared_with_float32_over_the_same_samples(tmp_path: Path) -> None:
    flags = ["--rows", "float32,int8", "--seeds", "1", "--batches", "3", "--batch", "4"]

    figures = measured(tmp_path, "narrow.py", *flags)

    float32, int8 = figures["rows"]
    assert (float32["encoding"], float32["percent"]) == ("float32", 0.0)
    assert (int8["base"], int8["samples"], int8["commits"]) == ("float32", 3 * 4, 3)
    assert abs(int8["percent"]) < 5
    assert int8["curves"][0][0] == float32["curves"][0][0], "the same model, untrained"
