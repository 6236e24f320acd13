"""The last lines of a worker's output: plain text, of a plain file, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import AddressFamily, create_connection, create_server

import pytest

from andon_server.board.output import last_lines, user_of_sender
from andon_server.crashes import Crash, CrashKind, read_crashes, write_crash
from unit.andon_server.board.boards import OPERATORS, RUN, Board, MakeBoard


def test_the_last_fifty_lines_are_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    lines = [f"\x1b[32mstep {step}\x1b[0m" for step in range(100)]
    progress = "\r 10 %\r 100 %\r"
    (tmp_path / "worker-1.log").write_text("\n".join([*lines, progress, "cut \x07of"]))

    shown = last_lines(tmp_path, 1)

    assert shown == [*(f"step {step}" for step in range(52, 100)), " 100 %", "cut of"]


def test_of_a_long_log_only_whole_lines_of_its_end_are_shown(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"x" * (1 << 20) + b"\n\xff last\n")

    assert last_lines(tmp_path, 0) == ["\N{REPLACEMENT CHARACTER} last"]


def test_an_empty_log_has_no_lines_and_one_that_is_missing_or_no_plain_file_is_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "worker-0.log").touch()
    (tmp_path / "worker-1.log").symlink_to(tmp_path / "secret")
    (tmp_path / "worker-2.log").mkdir()

    assert [last_lines(tmp_path, worker) for worker in range(4)] == [[], None, None, None]


@pytest.fixture
def ours() -> Iterator[dict[str, str]]:
    """What a request says that comes by a connection of this process."""
    with create_server(("127.0.0.1", 0)) as server, create_connection(server.getsockname()) as end:
        address, port = end.getsockname()
        yield {"REMOTE_ADDR": address, "REMOTE_PORT": str(port)}


def test_the_board_shows_a_workers_output_to_its_own_user(
    board: Board, tmp_path: Path, ours: dict[str, str]
) -> None:
    (tmp_path / "7f3a" / "worker-1.log").write_text("<b>step 1</b>\n")

    answer = board.get("/board/api/workers/1/output", **ours)

    assert (answer.status, answer.json) == (200, {"lines": ["<b>step 1</b>"], "crashes": []})


def test_the_board_says_how_a_workers_processes_failed(
    board: Board, tmp_path: Path, ours: dict[str, str]
) -> None:
    (tmp_path / "7f3a" / "worker-1.log").touch()
    crash = Crash(
        name="worker 1",
        slot=1,
        kind=CrashKind.KILLED_FOR_MEMORY,
        text="the kernel killed it",
        exit_code=-9,
        at_unix_s=1e9,
        ran_s=60.0,
        step=7,
        starts_again=True,
        output=("a secret",),
    )
    other = replace(crash, name="worker 0", slot=0)
    for each in (crash, other):
        assert write_crash(tmp_path / "7f3a", each) is not None

    answer = board.get("/board/api/workers/1/output", **ours)

    assert [each["text"] for each in answer.json["crashes"]] == ["the kernel killed it"]
    assert read_crashes(tmp_path / "7f3a") == [crash, other]


@pytest.mark.parametrize("told", [{}, {"HTTP_AUTHORIZATION": "Bearer of-another-line-1234567"}])
def test_who_may_not_read_the_logs_sees_the_board_without_output(
    board: Board, tmp_path: Path, told: dict[str, str]
) -> None:
    (tmp_path / "7f3a" / "worker-1.log").write_text("step 1\n")

    refused = board.get("/board/api/workers/1/output", **told)

    assert refused.status == 403
    assert "--viewer-token-file" in refused.text
    assert "step 1" not in refused.text


_CONNECT = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[3]))  # From here on it may not be allowed to import anything.
end = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user; then: sudo pytest")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_sender_is_the_kernels_word(host: str) -> None:
    family = AddressFamily.AF_INET6 if ":" in host else AddressFamily.AF_INET
    nobody, command = 65534, [sys.executable, "-c", _CONNECT]
    with create_server((host, 0), family=family) as server:
        server.settimeout(30)
        port = str(server.getsockname()[1])
        with subprocess.Popen([*command, host, port, str(nobody)], stdin=subprocess.PIPE):
            end, peer = server.accept()
            sender = {"REMOTE_ADDR": peer[0], "REMOTE_PORT": str(peer[1])}

            with end:
                assert user_of_sender(sender) == nobody


@pytest.mark.parametrize("worker", ["2", "-1", "", "1.log", "..", "\u0661", "%31", "9" * 30])
def test_what_is_no_workers_number_or_has_no_log_is_not_found(
    board: Board, tmp_path: Path, ours: dict[str, str], worker: str
) -> None:
    (tmp_path / "7f3a" / "worker-1.log").write_text("step 1\n")

    answer = board.get(f"/board/api/workers/{worker}/output", **ours)

    assert answer.status == 404
    assert "not kept beside its service" in answer.text


def test_output_needs_the_same_token_as_the_rest_of_the_board(
    make_board: MakeBoard, tmp_path: Path
) -> None:
    board = make_board(run_token=RUN, operator_token=OPERATORS)
    (tmp_path / "7f3a" / "worker-0.log").write_text("step 1\n")
    path = "/board/api/workers/0/output"

    refused = board.get(path)
    shown = board.get(path, HTTP_AUTHORIZATION=f"Bearer {RUN.decode()}")

    assert refused.status == 401
    assert "step 1" not in refused.text
    assert shown.json == {"lines": ["step 1"], "crashes": []}
