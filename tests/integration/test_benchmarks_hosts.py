"""The benchmark between hosts makes, measures and removes them. No test depends on the speed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.fixtures.benchmarks import benchmark_in_small, measured, ran
from integration.harness import clean_environment

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hosts.py"

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2",
)


@benchmark_in_small
@pytest.mark.netns
@needs_namespaces
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (apt-get install gcc)")
def test_a_lane_of_several_connections_gets_past_a_cap_of_each_flow(tmp_path: Path) -> None:
    figures = measured(
        tmp_path, "wide_lanes.py", "--cases", "cap-1,cap-8,cap-8-tls", "--pairs", "1"
    )

    one, *eight = figures["rows"]
    assert all(row["by_tcp"] for row in figures["rows"])
    # The cap is a fifth of the link, whatever else the machine does.
    assert one["of_link"] < 0.22
    assert all(row["of_link"] > 0.25 for row in eight)


@benchmark_in_small
@pytest.mark.netns
@needs_namespaces
def test_four_reducers_send_over_each_link_what_a_ring_does_and_a_quarter_in_8_bits(
    tmp_path: Path,
) -> None:
    out = tmp_path / "hosts.json"

    command = [sys.executable, str(SCRIPT), "--cases", "reducers-float32,reducers-int8"]
    command += ["--mbit", "1000", "--mib", "16", "--pairs", "1", "--json", str(out)]
    running = subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = running.communicate()

    if running.returncode == 1 and errors.startswith("hosts.py: "):
        pytest.skip(errors.strip())
    assert running.returncode == 0, errors
    whole, narrow = json.loads(out.read_text())["rows"]
    for row, side in ((whole, "ours"), (whole, "gloo"), (narrow, "gloo")):
        assert all(1.45 < times < 1.7 for times in _links(row, side)), row
    assert all(0.37 < times < 0.5 for times in _links(narrow, "ours")), narrow
    # Its own: another benchmark or test may have others at the same time.
    own = f"andon-net{running.pid % 250}-"
    assert not [name for name in _namespaces() if name.startswith(own)]


@benchmark_in_small
@pytest.mark.netns
@needs_namespaces
def test_ranks_that_share_a_host_cross_its_link_once_together(tmp_path: Path) -> None:
    figures = measured(
        tmp_path,
        *("hosts.py", "--cases", "c10d-float32", "--hosts", "2", "--ranks-per-host", "2"),
        *("--mib", "16", "--pairs", "1"),
    )

    [row] = figures["rows"]
    # A tensor of this size and two ranks of each host: half of it each way in each of two stages.
    assert all(0.95 < times < 1.1 for times in row["ours_sent"] + row["ours_received"]), row
    assert all(1.4 < times < 1.7 for times in row["gloo_sent"] + row["gloo_received"]), row


@needs_namespaces
def test_a_congestion_control_that_the_kernel_lacks_is_refused_by_name() -> None:
    done = ran("hosts.py", "--congestion", "pigeon")

    assert done.returncode == 1
    assert "no congestion control 'pigeon', only" in done.stderr


def _links(row: dict[str, Any], side: str) -> list[float]:
    links = [*row[f"{side}_sent"], *row[f"{side}_received"]]
    assert len(links) == 8
    return links


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@benchmark_in_small
@pytest.mark.netns
@needs_namespaces
def test_line_rates_are_measured_and_become_a_table(tmp_path: Path) -> None:
    flags = (
        *("--paths", "reducers,shared-memory", "--encodings", "float32", "--tls", "off"),
        *("--transports", "grpc", "--mib", "16", "--pairs", "1"),
    )

    figures = measured(tmp_path, "line_rates.py", *flags)
    table = ran("line_rates.py", "--table", str(tmp_path / "results" / "figures.json"))

    several, shared = figures["rows"]
    assert all(cpu_s > 0 for cpu_s in several["ours_cpu_s"] + several["gloo_cpu_s"])
    assert max(shared["ours_sent"]) < 0.1 < 1.4 < min(several["ours_sent"])
    assert "| a reducer on each host | float32 | gRPC | no |" in table.stdout
    assert "| Gloo's ring | float32 | TCP | no |" in table.stdout


def test_the_tables_in_the_documents_are_what_their_figures_say() -> None:
    done = ran("tables.py", "--check")

    assert done.returncode == 0, f"{done.stdout}Write them anew: python benchmarks/tables.py"
