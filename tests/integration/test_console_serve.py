"""`andon serve`: what it announces, and what answers on its ports."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from integration.fixtures.console import (
    PROTOCOL_WORKER,
    andon,
    announced,
    finish,
    fork,
    lines_until,
    run_warm,
)
from unit.andon_cli.pipes import end_of

pytestmark = pytest.mark.integration


def test_a_service_announces_where_it_is_and_leaves_that_in_its_run_directory_for_those_who_ask(
    tmp_path: Path,
) -> None:
    with announced(tmp_path, "--run-id", "7f3a", "--advertise", "localhost") as (told, process):
        left = json.loads((tmp_path / "runs/7f3a/service.json").read_text())
    code, _, errors = andon(tmp_path, "status")

    assert told == left
    assert told["run_id"] == "7f3a"
    assert told["pid"] == process.pid
    assert told["address"].startswith("127.0.0.1:")
    assert told["advertised"] == told["address"].replace("127.0.0.1", "localhost")
    assert told["metrics_url"].startswith("http://localhost:")
    assert told["board_url"].startswith("http://127.0.0.1:")
    assert Path(told["journal"]) == tmp_path / "runs/7f3a/journal.sqlite"
    assert Path(told["journal"]).is_file()
    # It has ended: who asks after it is told where its records are.
    assert code == 5
    assert told["journal"] in errors


OPEN = ("--bind", "0.0.0.0", "--insecure")


def _board_answers(told: dict[str, Any], host: str) -> int:
    """The status with which the board of an announced service answers a request for `host`."""
    port = told["metrics_url"].rpartition(":")[2].partition("/")[0]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/board/api/state", headers={"Host": f"{host}:{port}"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


@pytest.mark.parametrize("place", [(), ("--published-on", "10.0.0.7")])
def test_a_service_on_every_address_without_a_token_shows_no_board(
    tmp_path: Path, place: tuple[str, ...]
) -> None:
    with announced(tmp_path, *OPEN, *place) as (told, _):
        assert told["board_url"] == ""
        assert _board_answers(told, "127.0.0.1") == 403


def test_a_container_that_is_published_on_loopback_shows_its_board_to_the_host(
    tmp_path: Path,
) -> None:
    with announced(tmp_path, *OPEN, "--published-on", "127.0.0.1") as (told, _):
        assert told["board_url"].startswith("http://127.0.0.1:")
        assert [_board_answers(told, host) for host in ("127.0.0.1", "localhost")] == [200, 200]
        assert _board_answers(told, "evil.example") == 403


_ASKING = (
    "status", "status --format json", "top --once", "top --once --format json", "health", "drain",
)  # fmt: skip
"""Commands that a line without workers answers, in an order in which it can."""


def test_a_line_that_nobody_joined_answers_also_where_nobody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with announced(tmp_path, "--workers", "3", "--run-id", "7f3a"):
        code, table, errors = andon(tmp_path, "status")
        json_code, text, _ = andon(tmp_path, "status", "--format", "json")
        monkeypatch.chdir(tmp_path)
        unread = {verb: end_of(verb.split(), monkeypatch) for verb in _ASKING}

    assert (code, errors) == (0, "")
    assert table.splitlines()[0].startswith("run 7f3a  FORMING  step 0  epoch 0")
    told = json.loads(text)
    assert json_code == 0
    assert (told["run_id"], told["state"], told["expect_workers"]) == ("7f3a", "FORMING", 3)
    assert unread == dict.fromkeys(_ASKING, 141)
    assert capfd.readouterr().err == ""


def test_status_follows_a_line_over_a_restart_of_its_service(tmp_path: Path) -> None:
    with announced(tmp_path, "--run-id", "7f3a"):
        process = fork(tmp_path, "status", "--watch", "--format", "json")
        seen = lines_until(process, '"state": "FORMING"')
    lost = lines_until(process, '"state": "LOST"')
    with announced(tmp_path, "--run-id", "7f3a"):
        lines_until(process, '"state": "FORMING"')
        process.send_signal(signal.SIGINT)
        code, _, errors = finish(process)

    assert json.loads(seen[-1])["run_id"] == json.loads(lost[-1])["run_id"] == "7f3a"
    assert (code, errors) == (130, "")


def test_a_service_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with announced(tmp_path, anew=True) as (_, process):
            process.send_signal(signal.SIGHUP)
            code, _, _ = andon(tmp_path, "status")

            assert code == 0
            assert _ignores(process.pid, signal.SIGHUP)
            assert not _ignores(process.pid, signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("verb", ["status", "health"])
def test_without_a_run_a_question_says_what_to_do(tmp_path: Path, verb: str) -> None:
    code, output, errors = andon(tmp_path, verb)

    assert (code, output) == (5, "")
    assert errors.startswith("andon: there is no run")
    assert "--address" in errors


def test_a_port_or_a_journal_that_is_taken_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with announced(tmp_path, "--run-id", "7f3a") as (told, _):
        port = told["address"].rpartition(":")[2]
        code, output, errors = andon(tmp_path, "serve", "--port", port, "--metrics-port", "0")
        any_port = ("--port", "0", "--metrics-port", "0")
        again, _, why = andon(tmp_path, "serve", *any_port, "--run-id", "7f3a")

    assert (code, output) == (1, "")
    assert "--port 0" in errors
    assert "Traceback" not in errors
    assert again == 1
    assert str(told["pid"]) in why


def test_a_run_that_is_over_is_not_served_until_it_is_complete(tmp_path: Path) -> None:
    run = ("run", "--workers", "1", "--run-id", "7f3a", PROTOCOL_WORKER, "2")
    code, output, errors = run_warm(tmp_path, *run, room="service")
    assert code == 0, output + errors

    ports = ("--port", "0", "--metrics-port", "0", "--run-id", "7f3a")
    code, output, _ = andon(tmp_path, "serve", *ports, "--until-complete", "--announce")

    assert (code, output) == (0, "")


def test_a_service_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    code, output, _ = andon(tmp_path, "serve", "--port", "0", "--parent-pid", "1", "--announce")

    assert code == 130
    assert output == ""
