"""`andon run` with workers that implement the protocol and need no PyTorch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import (
    PROTOCOL_WORKER,
    andon,
    finish,
    lines_until,
    processes_of,
    run_warm,
    start,
    start_warm,
)
from integration.harness import clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WAITER = """\
import signal, sys, time
if "--deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def waiter(tmp_path: Path) -> str:
    """A script that never joins and waits for an interrupt."""
    script = tmp_path / "waiter.py"
    script.write_text(WAITER)
    return str(script)


def test_a_run_of_a_module_says_a_line_a_step_and_reports_what_the_journal_holds(
    tmp_path: Path,
) -> None:
    code, output, errors = andon(
        tmp_path,
        *("run", "--workers", "2", "--steps", "6", "--run-id", "7f3a", "--report", "r.json"),
        *("-m", "protocol_worker", "100"),
        PYTHONPATH=os.path.dirname(PROTOCOL_WORKER),
    )

    assert (code, errors) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["run_id"], report["steps"], report["exit_code"]) == ("7f3a", 6, 0)
    assert report["losses"] == pytest.approx([1 / step for step in range(1, 7)])
    assert report["samples"] == [4] * 6
    assert set(report["digests"]) == {"0", "1"}
    assert len(set(report["digests"].values())) == 1
    with JournalReader(tmp_path / report["journal"]) as journal:
        assert journal.losses() == report["losses"]
    lines = output.splitlines()
    assert lines[-4].startswith("complete: 6 steps, loss 0.167, ")
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}/6" for step in range(1, 7)
    ]
    [banner] = [line for line in lines if line.startswith("run ")]
    assert "  coordinator 127.0.0.1:" in banner
    assert banner.endswith("/metrics  2 workers on cpu (1 thread each)")


def test_output_is_prefixed_and_kept_in_logs_and_a_log_on_a_full_disk_stops_nobody(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / f"runs/7f3a/worker-{slot}.log" for slot in (0, 1)]
    logs[1].parent.mkdir(parents=True)
    logs[1].symlink_to("/dev/full")

    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", PROTOCOL_WORKER, "2"),
        room="service",
    )

    lines = output.splitlines()
    assert code == 0, output
    for slot in (0, 1):
        assert f"[worker {slot}] step 2 loss 0.500" in lines
    assert logs[0].read_text() == "step 1 loss 1.000\nstep 2 loss 0.500\n"
    assert [line for line in lines if "can't be written" in line] == [
        "runs/7f3a/worker-1.log can't be written (No space left on device): it lacks output"
    ]


def test_a_run_whose_own_output_meets_a_full_disk_goes_on_and_says_so_once(tmp_path: Path) -> None:
    words = ("run", "--report", "r.json", PROTOCOL_WORKER, "2")
    code, _, errors = finish(start_warm(tmp_path, *words, room="service", stdout=Path("/dev/full")))

    assert code == 0
    assert errors == (
        "andon: the output can't be written (No space left on device): the run goes on\n"
    )
    assert json.loads((tmp_path / "r.json").read_text())["steps"] == 2


def test_a_halt_ends_workers_that_raise_with_code_3_and_is_in_the_report(tmp_path: Path) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--on-halt", "raise", "--report", "r.json"),
        *(PROTOCOL_WORKER, "5", "--nan-at", "3"),
        room="service",
    )

    assert "it starts again" not in output
    report = json.loads((tmp_path / "r.json").read_text())
    assert code == report["exit_code"] == 3
    assert report["steps"] == 2
    [halt] = report["halts"]
    assert (halt["reason"], halt["worker"], halt["step"]) == ("non_finite_gradient", 1, 3)
    assert (halt["parameter"], halt["element"], halt["value"]) == ("w", [0], "nan")
    assert "positions 0 to 3): worker 1 sent nan in w[0] (block 0). No weight moved." in output


def test_a_script_that_fails_ends_the_run_with_code_1_and_no_process_is_left(
    tmp_path: Path,
) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--restarts", "0", PROTOCOL_WORKER, "5", "--fail-at", "2"),
        room="service",
    )

    assert code == 1
    assert "worker 1 ended with exit code 1" in output
    assert "RuntimeError: this script fails, as requested" in output
    assert processes_of(tmp_path) == []


def test_the_board_shows_the_script_the_way_of_gradients_and_what_a_worker_printed(
    tmp_path: Path,
) -> None:
    def read(path: str) -> Any:
        with urlopen(f"{board}board/api/{path}", timeout=30) as answer:
            return json.load(answer)

    process = start_warm(
        tmp_path, "run", "--run-id", "7f3a", PROTOCOL_WORKER, "1000000", room="service"
    )
    lines_until(process, "[worker 0] step 1 ")
    board = json.loads((tmp_path / "runs/7f3a/service.json").read_text())["board_url"]
    deadline = time.monotonic() + 30
    while not (state := read("state"))["paths"] and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = read("workers/0/output")["lines"]
    process.send_signal(signal.SIGINT)
    finish(process)

    assert (state["run_id"], state["script"]) == ("7f3a", "protocol_worker.py")
    assert (state["host"], state["encoding"]) == (socket.gethostname(), "float32")
    assert (state["paths"], state["keeps_output"]) == (["gRPC"], True)
    assert 0 < len(lines) <= 50
    assert all(line.startswith("step ") for line in lines)


def test_a_script_without_pytorch_that_fails_is_started_again_and_the_run_completes(
    tmp_path: Path,
) -> None:
    code, output, _ = run_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2"),
        *(PROTOCOL_WORKER, "6", "--fail-at", "3", "--fail-once"),
        room="service",
    )

    assert code == 0, output
    assert "worker 1 ended with exit code 1: it starts again" in output
    assert "\ncomplete: 6 steps" in output


def test_a_script_without_pytorch_is_told_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    (tmp_path / "train.py").write_text("import torch")

    # The launcher looks for PyTorch, too: it must be as new as the worker.
    code, output, _ = finish(start(tmp_path, "run", "train.py", PYTHONPATH=str(tmp_path)))

    assert code == 1
    assert "PyTorch is not installed for" in output
    assert "pip install 'andon[trainer]'" in output


def test_a_run_that_was_started_without_standard_streams_completes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "andon_cli", "run", "--workers", "2", PROTOCOL_WORKER, "3"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]

    ended = subprocess.run([*closed, *command], cwd=tmp_path, env=clean_environment(), check=False)

    assert ended.returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert "step 3" in (run / "worker-0.log").read_text()


def test_a_script_that_never_joins_is_no_complete_run(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")

    code, output, _ = run_warm(tmp_path, "run", str(script), room="service")

    assert code == 1
    assert "was never on the line" in output
    assert "docs/guide/plain-script.md has whole scripts, and docs/guide/pytorch.md" in output


def test_ctrl_c_ends_the_run_with_130_and_leaves_no_process(tmp_path: Path, waiter: str) -> None:
    process = start_warm(tmp_path, "run", "--workers", "2", waiter, room="service")
    lines_until(process, "[worker 0] here")

    process.send_signal(signal.SIGINT)
    code, output, _ = finish(process)

    assert code == 130
    assert "stopped (interrupted): 0 steps" in output
    assert processes_of(tmp_path) == []


def test_a_run_where_ctrl_c_is_ignored_ends_with_its_terminal(tmp_path: Path, waiter: str) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `andon run &`
    try:
        process = start(tmp_path, "run", "--restarts", "0", waiter)
    finally:
        signal.signal(signal.SIGINT, before)
    lines_until(process, "[worker 0] here")

    process.send_signal(signal.SIGHUP)
    code, output, _ = finish(process)

    assert code == 130
    assert "interrupted: the workers end" in output
    assert "did not end by themselves" not in output  # Its workers ignore Ctrl-C, too.
    assert processes_of(tmp_path) == []


def test_a_second_ctrl_c_ends_workers_that_do_not_listen(tmp_path: Path, waiter: str) -> None:
    process = start_warm(tmp_path, "run", waiter, "--deaf", room="service")
    lines_until(process, "[worker 0] here")

    process.send_signal(signal.SIGINT)
    lines_until(process, "once more ends them at once")
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process)

    assert code == 130
    assert processes_of(tmp_path) == []


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path: Path, waiter: str) -> None:
    process = start(tmp_path, "run", "--workers", "2", waiter, "--deaf")
    lines_until(process, "[worker 0] here")

    process.kill()
    finish(process)

    deadline = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


def test_a_run_whose_output_nobody_reads_any_more_ends_in_order(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path, "run", "--report", "r.json", PROTOCOL_WORKER, "1000000", room="service"
    )
    lines_until(process, "[worker 0] step 1 ")

    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, errors = finish(process)

    assert (code, errors) == (130, "")
    assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == 130
    assert processes_of(tmp_path) == []


def test_a_second_launch_joins_the_line_of_the_first(tmp_path: Path) -> None:
    first = start_warm(
        tmp_path,
        *("run", "--expect", "2", "--run-id", "7f3a", PROTOCOL_WORKER, "3"),
        room="service",
    )
    *_, hint = lines_until(first, "others here join with")

    words = (*hint.partition("andon ")[2].split()[:-1], PROTOCOL_WORKER, "3")
    code, output, _ = run_warm(tmp_path, *words, room="service")

    assert code == 0
    assert "step 3" in output
    assert finish(first)[0] == 0
