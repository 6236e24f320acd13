"""The benchmarks run and write their figures. No test depends on the speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.fixtures.benchmarks import benchmark_in_small, measured, ran

pytestmark = pytest.mark.integration

MEMORY_MIB, MEMORY_STEPS = 4, 80

_MADE_UP = """
import pytest
pytestmark = pytest.mark.cuda
def test_good(): pass
def test_bad(): raise ValueError
@pytest.mark.skip(reason="made up")
def test_absent(): pass
"""


def test_the_exchange_benchmark_writes_a_row_beside_its_machine(tmp_path: Path) -> None:
    flags = ("--paths", "wire", "--workers", "2", "--kib", "4", "--pairs", "1")

    figures = measured(tmp_path, "exchange.py", *flags)

    assert figures.keys() == {"machine", "rows"}
    assert figures["machine"]["cores"] > 0
    (row,) = figures["rows"]
    low, high = row.pop("spread")
    ours_s, gloo_s, ratio = row.pop("ours_s"), row.pop("gloo_s"), row.pop("ratio")
    of_memory = row.pop("of_memory")
    cpu_s = [row.pop(name) for name in ("service_cpu_s", "workers_cpu_s", "gloo_cpu_s")]
    assert row == {
        "path": "wire",
        "workers": 2,
        "kib": 4,
        "encoding": "float32",
        "gloo_encoding": "float32",
    }
    assert of_memory > 0
    assert min(cpu_s) > 0
    assert ours_s > 0
    assert gloo_s > 0
    assert low <= ratio <= high


@benchmark_in_small
@pytest.mark.timeout(300)
def test_the_calls_of_a_process_group_are_measured_beside_gloos(tmp_path: Path) -> None:
    flags = ("--paths", "c10d", "--workers", "2", "--kib", "4", "--pairs", "1")

    figures = measured(tmp_path, "exchange.py", *flags, "--calls", "all_reduce,all_to_all")

    assert [row["call"] for row in figures["rows"]] == ["all_reduce", "all_to_all"]
    for row in figures["rows"]:
        low, high = row["spread"]
        assert (row["ranks"], row["kib"], row["backend"], row["at_once"]) == (2, 4, "andon", 200)
        assert min(row[f"{side}_{what}"] for side in ("ours", "gloo") for what in ("s", "cpu_s"))
        assert low <= row["ratio"] <= high


@benchmark_in_small
@pytest.mark.timeout(300)
def test_a_step_of_ddp_over_andon_leaves_the_weights_of_one_over_gloo(tmp_path: Path) -> None:
    flags = ("--steps", "1", "--layers", "1", "--width", "64", "--samples", "1")

    figures = measured(tmp_path, "ddp_step.py", *flags)

    (row,) = figures["rows"]
    assert row["weights_equal"]
    assert min(row["ours_s"], row["gloo_s"], row["solo_s"]) > 0


def test_the_benchmark_of_crowds_tells_the_core_alone_and_a_real_line(tmp_path: Path) -> None:
    figures = measured(tmp_path, "crowd.py", "--workers", "3", "--steps", "5", "--rest-s", "0.1")

    assert figures.keys() == {"machine", "descriptors", "rows"}
    (row,) = figures["rows"]
    assert (row["workers"], row["steps"]) == (3, 2)
    assert row["simulated"]["step_ms"] > 0
    assert row["steps_per_s"] > 0
    assert min(row["service_mib"].values()) > 0
    assert min(row[name]["bytes"] for name in ("metrics", "sd", "board")) > 0


@benchmark_in_small
def test_the_benchmark_of_encryption_tells_both_lines_and_their_ratio(tmp_path: Path) -> None:
    figures = measured(tmp_path, "security.py", "--mib", "1", "--pairs", "1")

    assert figures.keys() == {"machine", "rows"}
    (row,) = figures["rows"]
    low, high = row["spread"]
    assert (row["workers"], row["mib"], row["pairs"]) == (2, 1, 1)
    assert min(row["clear_s"], row["mtls_s"]) > 0
    # Both figures are rounded separately.
    assert low - 1e-3 <= row["ratio"] <= high + 1e-3


@benchmark_in_small
@pytest.mark.timeout(400)
def test_the_storm_counts_every_sample_of_a_run_whose_processes_are_killed(tmp_path: Path) -> None:
    flags = ("--systems", "andon", "--replicas", "2", "--batch", "8", "--minutes", "0.5")

    figures = measured(tmp_path, "storm.py", *flags, "--every", "6", "--undisturbed-minutes", "0.1")

    (row,) = figures["rows"]
    assert (row["system"], row["samples_lost"], row["samples_doubled"]) == ("andon", 0, 0)
    assert row["digest"] == "equal"
    assert sum(row["faults"].values()) + row["faults_without_victim"] == 4
    assert row["samples_kept"] == row["steps"] * 8
    assert row["of_undisturbed"] > 0


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        ("exchange.py", "--paths", "pigeon"),
        ("exchange.py", "--workers", "1"),
        ("storm.py", "--systems", "pigeon"),
        ("exchange.py", "--mib", "many"),
        ("exchange.py", "--kib", "0"),
        ("exchange.py", "--encodings", "int2"),
        ("exchange.py", "--calls", "pigeon"),
        ("uneven.py", "--schedules", "pigeon"),
        ("uneven.py", "--repeats", "0"),
        ("uneven.py", "--cores", "0"),
        ("hosts.py", "--cases", "pigeon"),
    ],
)
def test_what_can_not_be_measured_is_refused_by_its_flag(
    script: str, flag: str, value: str
) -> None:
    done = ran(script, flag, value)

    assert done.returncode == 2
    assert flag in done.stderr.splitlines()[-1]


def test_memory_of_service_and_workers_is_bounded_whatever_the_number_of_steps(
    tmp_path: Path,
) -> None:
    flags = ("--mib", str(MEMORY_MIB), "--steps", str(MEMORY_STEPS), "--every", "20")

    figures = measured(tmp_path, "memory.py", *flags)

    for who in ("service", "worker"):
        row = figures[who]
        assert len(row["seen_mib"]) == MEMORY_STEPS // 20
        # A leak of one average per step would be five times as large.
        assert row["most_mib"] - row["idle_mib"] < MEMORY_STEPS * MEMORY_MIB / 5


def test_the_journal_benchmark_writes_a_small_file_and_reads_all_of_it(tmp_path: Path) -> None:
    figures = measured(
        tmp_path, "journal.py", "--steps", "4000", "--repeats", "1", "--single", "10"
    )

    assert (figures["steps"], figures["contributions_a_step"]) == (4000, 4)
    assert figures["bytes_per_step"] < 320
    assert all(value > 0 for name, value in figures.items() if name.endswith("_ms"))


def test_the_benchmark_of_checks_writes_both_figures(tmp_path: Path) -> None:
    figures = measured(tmp_path, "checks.py", "--megabytes", "1", "--repeats", "2")

    assert figures["megabytes"] == 1.0
    for name in ("digest_cpu_ms", "gradient_norm_cpu_ms", "digest_wall_ms"):
        assert 0 <= figures[name]["least"] <= figures[name]["median"] <= figures[name]["greatest"]


def test_the_benchmark_of_metrics_writes_the_time_of_a_step_and_of_a_scrape(
    tmp_path: Path,
) -> None:
    figures = measured(tmp_path, "telemetry.py", "--steps", "20", "--repeats", "2")

    assert figures["worker"].keys() == {"step", "scrape_text", "scrape_openmetrics"}
    for workers in (2, 8, 64):
        for each in figures[f"{workers}_workers"].values():
            assert 0 < each["least"] <= each["median"] <= each["greatest"]


def test_the_recovery_benchmark_writes_each_part_of_a_recovery(tmp_path: Path) -> None:
    flags = ("--repeats", "1", "--only", "sigkill_to_commit_s")

    figures = measured(tmp_path, "recovery.py", *flags)

    (recovery,) = figures["sigkill_to_commit_s"]["repeats"]

    total = recovery.pop("total")
    assert recovery.keys() == {"detection", "re-assignment", "recomputation", "commit"}
    assert min(recovery.values()) >= 0
    assert abs(sum(recovery.values()) - total) < 1e-3


@benchmark_in_small
def test_what_runs_on_gpus_measures_on_the_cpu_as_well(tmp_path: Path) -> None:
    tiny = ["--layers", "1", "--width", "64", "--context", "8", "--samples", "1", "--steps", "2"]
    tiny += ["--models", "mlp", "--rounds", "1", "--pairs", "1", "--block", "2"]
    tests = tmp_path / "test_made_up.py"
    tests.write_text(_MADE_UP)

    flags = ("--device", "cpu", *tiny, "--tests", str(tests))
    figures = measured(tmp_path, "gpu.py", *flags, expect_exit=1)  # a test failed

    assert figures["tests"] == {
        "passed": 1,
        "failed": ["test_bad"],
        "skipped": ["test_absent"],
    }
    (trained,), (alone,) = figures["training"], figures["overhead"]
    assert trained["devices"] == ["cpu"]
    assert min(trained[side] for side in ("ours_s", "ddp_s", "solo_s")) > 0
    assert 0 <= trained["hidden"] <= 1
    assert trained["loss_difference"] <= 1e-4
    assert (alone["model"], alone["steps"], alone["pairs"]) == ("mlp", 2, 1)
    assert alone["overhead"] == pytest.approx(alone["line_s"] / alone["plain_s"] - 1, abs=1e-3)


def test_without_cuda_what_needs_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"

    done = ran("gpu.py", "--json", str(out), CUDA_VISIBLE_DEVICES="")

    assert (done.returncode, out.exists()) == (0, False)
    assert len(done.stdout.splitlines()) == 1
    assert "sees no CUDA device, so nothing ran" in done.stdout
