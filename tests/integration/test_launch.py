"""One script, started in four ways: alone, `andon run`, torchrun, and environment variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.fixtures.console import (
    finish,
    lines_until,
    run_warm,
    standby_of,
    start_torchrun,
    start_warm,
)
from integration.harness import SCRIPTS, Service, await_exit, start_worker, train, train_alone

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 6}
SCRIPT = str(SCRIPTS / "train.py")


def write_spec(folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps({**SPEC, "slot": 0}))
    return ["spec.json", "out.json"]


def read(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return seen


def test_the_same_script_gives_the_same_losses_however_it_is_started(tmp_path: Path) -> None:
    console, torchrun = (tmp_path / name for name in ("console", "torchrun"))
    by_environment = train(tmp_path, SPEC, 2)[0]
    solo = train_alone(tmp_path / "solo", SPEC).seen

    words = ["run", "--workers", "2", "--report", "report.json", SCRIPT, *write_spec(console)]
    code, output, errors = run_warm(console, *words)
    assert code == 0, output + errors
    words = ["--nproc-per-node", "2", "--standalone", SCRIPT, *write_spec(torchrun)]
    code, output, errors = finish(start_torchrun(torchrun, *words))
    assert code == 0, output + errors

    report = json.loads((console / "report.json").read_text())
    assert by_environment["losses"] == read(console)["losses"] == read(torchrun)["losses"]
    assert by_environment["digest"] == read(console)["digest"] == read(torchrun)["digest"]
    assert solo["losses"] == pytest.approx(by_environment["losses"], abs=1e-5)
    assert report["losses"] == by_environment["losses"]
    assert set(report["digests"].values()) == {by_environment["digest"]}


def test_one_worker_on_the_line_is_solo_bit_for_bit(tmp_path: Path) -> None:
    spec = {**SPEC, "micro": 3, "optimizer": "adamw", "clip": 0.5}
    alone = train_alone(tmp_path / "solo", spec)

    # As `andon serve --help` says: a worker that knows only the address.
    with Service(tmp_path / "run", 1) as service:
        worker = start_worker(tmp_path, spec, ANDON_ADDRESS=service.address)
        await_exit([worker])

    assert worker.seen["losses"] == alone.seen["losses"]
    assert worker.seen["digest"] == alone.seen["digest"]


def test_a_standby_whose_launcher_is_gone_serves_nothing(tmp_path: Path) -> None:
    standby = [sys.executable, "-m", "andon_cli.launching.standby", "serve", "--run-dir", "run"]

    done = subprocess.run(standby, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False)

    assert done.returncode == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_killed_service_starts_again_on_its_journal_or_the_line_is_lost(
    tmp_path: Path, comes_back: bool
) -> None:
    spec = {**SPEC, "steps": 60, "slow": {"step": 3, "until": str(tmp_path / "go on")}}
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "slot": 0}))
    run = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", "--report", "report.json"),
        *(SCRIPT, "spec.json", "out.json"),
    )
    lines_until(run, " 4/60")
    standby = standby_of(tmp_path)

    if not comes_back:
        (tmp_path / "runs/7f3a/journal.sqlite-wal").unlink()
        (tmp_path / "runs/7f3a/journal.sqlite").write_bytes(b"no journal" * 1000)
    told = json.loads((tmp_path / "runs/7f3a/service.json").read_text())
    os.kill(told["pid"], signal.SIGKILL)
    lines_until(run, "the service was killed by SIGKILL: it starts again on its journal at once")
    (tmp_path / "go on").touch()
    code, output, _ = finish(run)

    report = json.loads((tmp_path / "report.json").read_text())
    assert code == report["exit_code"] == (0 if comes_back else 5)
    if comes_back:
        told = json.loads((tmp_path / "runs/7f3a/service.json").read_text())
        assert told["pid"] == standby
        assert len(report["losses"]) == 60
        assert report["samples"] == [8] * 60
        assert len(set(report["digests"].values())) == 1
    else:
        assert "(4 of 4)" in output
        assert "the line is lost" in output
