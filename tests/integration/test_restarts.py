"""`andon run --restarts`: workers that died are restarted; those that ended on purpose are not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from andon.host.trace import Track
from andon_server.crashes import CrashKind, read_crashes
from andon_server.runs import service_of
from integration.fixtures.console import (
    PROTOCOL_WORKER,
    finish,
    lines_until,
    processes_of,
    run_warm,
    start_warm,
    template_of,
    worker_of,
)
from integration.harness import SCRIPTS, wait_until
from unit.andon_cli.trace_format import assert_valid, events_in, spans_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SCRIPT = str(SCRIPTS / "resumable.py")


def test_a_worker_that_is_killed_starts_again_and_the_run_completes(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2", "--run-id", "7f3a", "--report", "r.json"),
        *("--trace", "t.json"),
        *(SCRIPT, str(tmp_path), "9", "--hold-at", "4", "--slot", "1"),
    )
    lines_until(process, "holding at step 4")
    # Each worker writes its part of the trace about once a second.
    parts = tmp_path / "t.json.parts"
    wait_until(lambda: sum('"joined"' in each.read_text() for each in parts.iterdir()) == 2)
    os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
    code, output, errors = finish(process)

    assert code == 0, output + errors
    assert "worker 1 was killed by SIGKILL: it starts again at once (restart 1 of 3)" in output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["steps"], report["restarts"], report["complete"]) == (9, 1, True)
    assert len(set(report["digests"].values())) == 1
    assert "holding at step 4" in (tmp_path / "runs/7f3a/worker-1.log").read_text()
    [crash] = read_crashes(tmp_path / "runs/7f3a")
    assert (crash.name, crash.kind, crash.starts_again) == ("worker 1", CrashKind.KILLED, True)
    assert crash.memory_bytes is None or crash.memory_bytes > 2**20
    assert f"worker 1: {crash.text}" in output
    assert crash.text in (tmp_path / "runs/7f3a/report.html").read_text()
    for made in (tmp_path / "r.json", tmp_path / "t.json", *(tmp_path / "runs/7f3a").rglob("*")):
        assert not made.stat().st_mode & 0o077, f"others may read {made}"
    # The trace has both lives of the killed worker, and what that did to the other one.
    events = assert_valid(tmp_path / "t.json")
    assert not (tmp_path / "t.json.parts").exists()
    happened = [[each["name"] for each in events_in(events, "i", 1000 + at)] for at in (0, 1)]
    assert "round void" in happened[0]
    assert happened[1].count("joined") == 2
    for at in (0, 1):
        assert {"step 9", "data", "compute", "wait for commit"} <= set(
            spans_of(events, 1000 + at, Track.SCRIPT)
        )
    assert "receive state" in spans_of(events, 1001, Track.SCRIPT)


def _launchers_step(line: str) -> int:
    """The step of a line that the launcher printed; 0: it is another line."""
    found = re.match(r"step (\d+)  ", line)
    return int(found[1]) if found else 0


def test_a_worker_that_trained_since_its_restart_starts_again_at_once(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path, *("run", "--workers", "2", "--restarts", "3"), PROTOCOL_WORKER, "100000"
    )
    lines_until(process, "[worker 1] step 20 ")
    for number in (1, 2):
        os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
        lines_until(process, f"it starts again at once (restart {number} of 3)")
        # It has made a step, and the launcher has seen a later one.
        lines_until(process, "[worker 1] step ")
        seen = lines_until(process, "[worker 1] step ")[-1]
        while _launchers_step(lines_until(process, "loss")[-1]) < int(seen.split()[3]) + 5:
            pass  # It does not show every step of a line as quick as this one.
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_worker_that_comes_back_after_the_end_does_not_spoil_the_run(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "1", "--report", "r.json"),
        *(SCRIPT, str(tmp_path), "9", "--hold-at", "8", "--slot", "1"),
    )
    lines_until(process, "holding at step 8")
    # It starts again with a new interpreter: a forked process would be back before the end.
    os.kill(template_of(tmp_path), signal.SIGKILL)
    os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
    code, output, errors = finish(process)

    assert code == 0, output + errors
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["steps"], report["complete"]) == (9, True)


def test_a_worker_that_is_killed_just_before_the_end_does_not_spoil_the_run(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "1", "--report", "r.json"),
        *(SCRIPT, str(tmp_path), "9", "--hold-at", "8", "--slot", "1"),
    )
    lines_until(process, "holding at step 8")
    # The launcher hears of the death only when the others have made the last step.
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
    (folder,) = (tmp_path / "runs").iterdir()
    while not ((served := service_of(folder)) and served.complete_at_unix_s):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGCONT)
    code, output, errors = finish(process)

    assert code == 0, output + errors
    assert "worker 1 was killed by SIGKILL as the others ended the run" in output
    assert json.loads((tmp_path / "r.json").read_text())["complete"]


def test_a_script_that_always_fails_at_one_step_is_stopped_by_the_line(tmp_path: Path) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2", "--on-halt", "raise"),
        *(SCRIPT, str(tmp_path), "9", "--fail-at", "4", "--slot", "1"),
    )

    assert code == 3, output
    assert output.count("it starts again") in (2, 3)
    assert "HALTED at step 4" in output
    assert processes_of(tmp_path) == []


def test_a_script_that_fails_on_all_workers_at_once_fails_the_run_since_nobody_has_the_state(
    tmp_path: Path,
) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2", "--on-halt", "raise"),
        *(SCRIPT, str(tmp_path), "9", "--fail-at", "4", "--slot", "-1"),
    )

    assert code == 1, output
    assert "RuntimeError: this script fails, as requested" in output
    assert "HALTED" not in output
    assert processes_of(tmp_path) == []


def test_restarts_run_out_and_then_the_run_fails(tmp_path: Path) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2", "--restarts", "1", "--report", "r.json"),
        *(PROTOCOL_WORKER, "9", "--fail-at", "4"),
    )

    assert code == 1, output
    assert output.count("it starts again") == 1
    assert "worker 1 ended with exit code 1: its output is in" in output
    assert json.loads((tmp_path / "r.json").read_text())["restarts"] == 1


def test_a_script_that_fails_before_the_first_step_is_not_started_again(tmp_path: Path) -> None:
    code, output, _ = run_warm(
        tmp_path,
        # The other one must not make that step before anybody sees this one's end.
        *("run", "--workers", "2", "--min-workers", "2", PROTOCOL_WORKER, "5", "--fail-at", "1"),
    )

    assert code == 1
    assert "it starts again" not in output


def test_the_only_worker_is_not_started_again_since_nobody_could_give_it_the_state(
    tmp_path: Path,
) -> None:
    process = start_warm(tmp_path, "run", "--workers", "1", PROTOCOL_WORKER, "100000")
    lines_until(process, "[worker 0] step 20 ")
    os.kill(worker_of(tmp_path, slot=0), signal.SIGKILL)
    code, output, _ = finish(process)

    assert code == 1
    assert "it starts again" not in output
