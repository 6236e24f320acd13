"""What panels show of a line that is known: promtool asks their queries of written series."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from andon_grafana.queries import PanelQuery, panel_queries

pytestmark = pytest.mark.prometheus

Shown = Mapping[str, Mapping[str, float]]
"""The values of a panel's queries, by legend and by the text of their labels."""

RUN = "7f3a"
SERVICE = f'job="andon", instance="alpha:9400", run="{RUN}"'


def promtool() -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    return tool


def line(metric: str, labels: str = "") -> str:
    """A series of the service."""
    return f"{metric}{{{SERVICE}{', ' if labels else ''}{labels}}}"


def of(worker: int, metric: str, labels: str = "", port: int = 9500) -> str:
    """A series of a worker's own endpoint."""
    where = f'job="andon", instance="beta:{port}", run="{RUN}", worker="{worker}"'
    return f"{metric}{{{where}{', ' if labels else ''}{labels}}}"


def queries(panel: str) -> list[PanelQuery]:
    found = [each for each in panel_queries(RUN, window="20s", span="2m") if each.panel == panel]
    assert found, f"there is no panel {panel}"
    return found


def check(folder: Path, series: Mapping[str, str], panel: str, shown: Shown) -> None:
    """Two minutes after the first of the series, with a sample each 5 s, a panel shows this."""
    cases = [
        {
            "expr": query.expr,
            "eval_time": "2m",
            "exp_samples": [
                {"labels": labels, "value": value}
                for labels, value in shown.get(query.legend, {}).items()
            ],
        }
        for query in queries(panel)
    ]
    assert shown.keys() <= {query.legend for query in queries(panel)}
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": cases,
    }
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [], "tests": [test]}))  # JSON is YAML.
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_itself_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": query.expr}
        for number, query in enumerate(panel_queries(RUN))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))

    done = subprocess.run(
        [promtool(), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.parametrize(("state", "code"), [("running", 2), ("syncing", 3), ("halted", 6)])
def test_the_state_is_the_number_of_the_series_that_is_one(
    tmp_path: Path, state: str, code: int
) -> None:
    states = ("forming", "running", "syncing", "halted", "draining", "complete")
    series = {
        line("andon_line_state", f'state="{each}"'): f"{int(each == state)}x24" for each in states
    }

    check(tmp_path, series, "State", {"": {"{}": code}})


def test_a_line_that_does_not_answer_has_no_state(tmp_path: Path) -> None:
    series = {line("andon_step").replace(RUN, "another"): "5x24"}

    check(tmp_path, series, "State", {})
    check(tmp_path, series, "Step", {})


def test_the_lines_own_halt_is_under_its_reason_and_a_persons_is_not(tmp_path: Path) -> None:
    reasons = {"non_finite_gradient": 1, "loss_spike": 0, "operator": 0}
    series = {
        line("andon_halted", f'reason="{reason}"'): f"{value}x24"
        for reason, value in reasons.items()
    }

    shown = {"{{reason}}": {'{reason="non_finite_gradient"}': 1.0}}
    check(tmp_path, series, "Halted now, because of", shown)
    check(tmp_path, series, "The line stopped itself", {"Halted: {{reason}}": shown["{{reason}}"]})
    check(tmp_path, series, "Somebody stopped it", {})


def test_a_halt_by_a_person_is_not_the_lines_own(tmp_path: Path) -> None:
    series = {
        line("andon_halted", 'reason="operator"'): "1x24",
        line("andon_halted", 'reason="loss_spike"'): "0x24",
    }

    check(tmp_path, series, "Halted now, because of", {"operator": {"{}": 2}})
    check(tmp_path, series, "When it was halted", {"operator": {"{}": 2}})
    check(tmp_path, series, "The line stopped itself", {})
    check(tmp_path, series, "Somebody stopped it", {"Halted by an operator": {"{}": 1}})


def test_only_reasons_that_occurred_are_listed(tmp_path: Path) -> None:
    series = {
        line("andon_jidoka_halts_total", 'reason="loss_spike"'): "2x24",
        line("andon_jidoka_halts_total", 'reason="journal"'): "0x24",
        line("andon_jidoka_halts_total", 'reason="operator"'): "1x24",
    }

    check(
        tmp_path,
        series,
        "Halts since the run began",
        {"{{reason}}": {'{reason="loss_spike"}': 2}, "operator": {"{}": 1}},
    )


def test_a_missing_worker_is_counted_and_one_too_many_is_not(tmp_path: Path) -> None:
    live = line("andon_workers", 'state="live"')
    expected = line("andon_workers_expected")

    check(tmp_path, {live: "2x24", expected: "3x24"}, "Missing", {"": {"{}": 1}})
    check(tmp_path, {live: "4x24", expected: "3x24"}, "Missing", {"": {"{}": 0}})


def test_the_time_left_is_at_the_present_pace_and_unknown_while_nothing_moves(
    tmp_path: Path,
) -> None:
    planned = {line("andon_steps_planned"): "1000x24"}
    moving = {line("andon_step"): "0+10x24"}
    halted = {line("andon_step"): "240x24"}

    # 760 steps at 2 a second. The run is younger than the window of the slope.
    check(tmp_path, planned | moving, "Time left", {"": {"{}": 380}})
    check(tmp_path, planned | halted, "Time left", {})
    check(tmp_path, moving, "Time left", {})


def test_who_waits_least_holds_up_only_those_who_wait_longer(tmp_path: Path) -> None:
    def waits(*ratios: float, running: bool = True) -> dict[str, str]:
        series = {
            line("andon_worker_wait_ratio", f'worker="{worker}"'): f"{ratio}x24"
            for worker, ratio in enumerate(ratios)
        }
        return series | {line("andon_line_state", 'state="running"'): f"{int(running)}x24"}

    shown = {"worker {{worker}}": {'{worker="1"}': 0.25}}
    check(tmp_path, waits(0.75, 0.25, 0.5), "Holds the line up", shown)
    check(tmp_path, waits(0.75, 0.25, 0.5, running=False), "Holds the line up", {})
    check(tmp_path, waits(0.27, 0.25, 0.26), "Holds the line up", {})
    check(tmp_path, waits(0.75), "Holds the line up", {})


def test_a_worker_that_came_back_on_another_port_is_one_series(tmp_path: Path) -> None:
    # Without its end: Prometheus shows the old one for five more minutes.
    series = {
        of(0, "andon_worker_step", port=9500): "0+1x12 _x12",
        of(0, "andon_worker_step", port=9501): "_x12 13+1x11",
        of(0, "andon_samples_total", port=9500): "0+40x12 _x12",
        of(0, "andon_samples_total", port=9501): "_x12 0+40x11",
    }

    check(
        tmp_path,
        series,
        "Steps of each worker a second",
        {"worker {{worker}}": {'{worker="0"}': 0.2}},
    )
    check(
        tmp_path,
        series,
        "Samples of each worker a second",
        {"worker {{worker}}: commits": {'{worker="0"}': 8}},
    )


def test_processes_are_named_by_what_they_are(tmp_path: Path) -> None:
    memory = "process_resident_memory_bytes"
    reducer = f'job="andon", instance="gamma:9401", run="{RUN}", reducer="gamma:7071"'
    series = {
        line(memory): "100x24",
        of(3, memory): "400x24",
        f"{memory}{{{reducer}}}": "200x24",
    }

    check(
        tmp_path,
        series,
        "Memory of each process",
        {
            "{{process}}": {
                '{process="reducer gamma:7071"}': 200,
                '{process="service"}': 100,
                '{process="worker 3"}': 400,
            }
        },
    )


def test_a_workers_path_is_the_slowest_that_it_took(tmp_path: Path) -> None:
    series = {
        of(0, "andon_exchange_path", 'path="shared-memory"'): "1x24",
        of(0, "andon_exchange_path", 'path="wire"'): "1x24",
        of(1, "andon_exchange_path", 'path="shared-memory"', port=9501): "1x24",
        of(1, "andon_exchange_path", 'path="wire"', port=9501): "0x24",
    }

    check(
        tmp_path,
        series,
        "Path of each worker's exchange",
        {"worker {{worker}}": {'{worker="0"}': 3, '{worker="1"}': 1}},
    )


@pytest.mark.parametrize("scraped", [0, 1, 2])
def test_live_workers_that_nobody_scrapes_are_counted(tmp_path: Path, scraped: int) -> None:
    series = {line("andon_workers", 'state="live"'): "2x24", line("up"): "1x24"}
    series |= {of(worker, "up", port=9500 + worker): "1x24" for worker in range(scraped)}

    check(tmp_path, series, "Workers not scraped", {"": {"{}": 2 - scraped}})


def test_only_attempts_beyond_a_steps_first_are_listed(tmp_path: Path) -> None:
    series = {
        line("andon_step_attempts_total", 'cause="first"'): "0+1x24",
        line("andon_step_attempts_total", 'cause="stream_lost"'): "0x11 3x12",
        line("andon_step_attempts_total", 'cause="left"'): "0x24",
    }

    check(
        tmp_path,
        series,
        "Repeated attempts, in the time shown",
        {"{{cause}}": {'{cause="stream_lost"}': 3}},
    )


def test_a_run_was_last_halted_when_it_was_seen_so(tmp_path: Path) -> None:
    series = {
        line("andon_halted", 'reason="loss_spike"'): "0x4 1x4 0x16",
        line("andon_halted", 'reason="operator"'): "0x24",
    }

    shown = {"last halt, in the time shown": {f'{{run="{RUN}"}}': 45_000}}
    check(tmp_path, series, "Runs", shown)


def test_a_worker_that_was_started_again_had_two_processes(tmp_path: Path) -> None:
    started = "process_start_time_seconds"
    series = {
        of(0, started, port=9500): "100x12 _x12",
        of(0, started, port=9501): "_x12 160x11",
    }

    check(tmp_path, series, "Its processes, in the time shown", {"": {"{}": 2}})


def test_an_exchange_counts_for_each_path_that_it_took(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for worker, seconds, wire in ((0, "0+5x24", 0), (1, "0+15x24", 1)):
        port = 9500 + worker
        series |= {
            of(worker, "andon_exchange_path", 'path="shared-memory"', port=port): "1x24",
            of(worker, "andon_exchange_path", 'path="wire"', port=port): f"{wire}x24",
            of(worker, "andon_exchange_seconds_sum", port=port): seconds,
            of(worker, "andon_exchange_seconds_count", port=port): "0+5x24",
        }

    shown = {'{path="shared-memory"}': 2, '{path="wire"}': 3}
    check(tmp_path, series, "Mean exchange by path", {"{{path}}": shown})
