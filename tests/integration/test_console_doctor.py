"""`andon doctor` and `andon health` on a healthy host, a served line, and dead addresses."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from andon_cli.commands.doctor.reach import check_lanes
from integration.fixtures.console import andon, announced, finish, processes_of
from integration.fixtures.launched import Launched
from integration.harness import Service, clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

IMPORTED_BY_HEALTH = """\
import sys
from andon_cli.app import main
code = main(["health", "--address", sys.argv[1]])
heavy = {"numpy", "rich", "torch", "google.protobuf", "andon_coordinator"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else code)
"""


QUICK_TORCH = """\
from types import SimpleNamespace
__version__ = "2.13"
cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
ones = lambda *_, **__: SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 8.0))
"""
"""What the doctor asks PyTorch, for tests that are not about devices: it takes a second to load."""


def doctor(folder: Path, *flags: str, **environment: str) -> tuple[int, str, str]:
    """What `andon doctor` says where PyTorch is loaded at once."""
    (folder / "torch.py").write_text(QUICK_TORCH)
    return andon(folder, "doctor", *flags, **environment)


def findings_of(text: str) -> dict[str, list[dict[str, Any]]]:
    """The findings in the doctor's JSON, by check."""
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(text)["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return by_check


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """A program on a free port that is not a gRPC server: it always answers with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopping = threading.Event()

        def serve() -> None:
            while not stopping.is_set():
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            stopping.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_on_a_healthy_host_nothing_fails_and_a_step_went_through_a_reducer(
    tmp_path: Path,
) -> None:
    words = ["-m", "andon_cli", "doctor", "--format", "json"]
    code, output, errors = finish(Launched("trainer", words, clean_environment(), tmp_path))

    found = findings_of(output)
    assert (code, errors) == (0, "")
    assert json.loads(output)["healthy"] is True
    assert {"packages", "ports", "runs", "shared memory", "clock", "devices"} <= set(found)
    [trial] = found["trial"]
    assert trial["level"] == "ok"
    assert "256 KiB back bit for bit" in trial["fact"]
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []


def test_a_line_that_is_served_is_asked_and_not_disturbed(tmp_path: Path) -> None:
    with announced(tmp_path, "--run-id", "7f3a") as (told, _):
        code, output, _ = doctor(tmp_path, "--address", told["address"], "--format", "json")
        _, status, _ = andon(tmp_path, "status", "--format", "json")

    found = findings_of(output)
    assert code == 0
    assert found["line"][0]["fact"] == "run 7f3a is FORMING at step 0, 0 live"
    assert "SERVING" in found["health"][0]["fact"]
    assert "andon.v1.Coordinator and andon.v1.Reducer" in found["services"][0]["fact"]
    assert found["lanes"][0]["fact"].endswith("can be reached: gradients take TCP lanes")
    assert "trial" not in found
    assert json.loads(status)["workers"] == []


def test_a_dead_address_fails_with_what_is_wrong_there(tmp_path: Path) -> None:
    code, output, errors = doctor(tmp_path, "--address", "127.0.0.1:9", "--format", "json")

    [finding] = findings_of(output)["line"]
    assert (code, errors) == (1, "")
    assert (finding["level"], finding["fact"]) == ("fail", "nothing listens at 127.0.0.1:9")
    assert "andon serve" in finding["remedy"]


def test_each_finding_is_a_line_that_says_ok_warn_or_fail(tmp_path: Path) -> None:
    code, output, _ = doctor(tmp_path, "--address", "no-such-host.invalid:7070")

    lines = output.splitlines()
    assert code == 1
    assert lines[0].startswith("ok    python 3.")
    assert {line[:6] for line in lines} <= {"ok    ", "warn  ", "fail  "}
    [failed] = [line for line in lines if line.startswith("fail")]
    assert failed.startswith("fail  there is no host no-such-host.invalid: check the name")


def test_another_program_on_the_port_is_not_taken_for_a_line(tmp_path: Path) -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        code, output, _ = doctor(tmp_path, "--address", address, "--format", "json")
        health, said, _ = andon(tmp_path, "health", "--address", address)

    [finding] = findings_of(output)["health"]
    assert (code, health) == (1, 1)
    assert "another program" in finding["remedy"]
    assert address in said


def test_lanes_that_cannot_be_reached_are_a_warning_that_says_what_happens() -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        [strange] = asyncio.run(check_lanes("127.0.0.1", int(address.rpartition(":")[2])))
    [closed] = asyncio.run(check_lanes("127.0.0.1", 9))
    [absent] = asyncio.run(check_lanes("127.0.0.1", 0))

    assert (strange.level, closed.level, absent.level) == ("warn", "warn", "ok")
    assert "is no listener of TCP lanes" in strange.fact
    assert "nothing listens at 127.0.0.1:9" in closed.fact
    assert "gradients travel over gRPC" in closed.remedy
    assert "--tcp-port" in closed.remedy


def test_a_taken_port_is_a_warning_that_names_the_flag(tmp_path: Path) -> None:
    with listening(b"") as address:
        port = address.rpartition(":")[2]
        code, output, _ = doctor(tmp_path, "--format", "json", ANDON_PORT=port)

    [warned] = [each for each in findings_of(output)["ports"] if port in each["fact"]]
    assert (code, warned["level"]) == (0, "warn")
    assert f"port {port} is not available" in warned["fact"]
    assert "--port 0" in warned["remedy"]


def test_health_is_0_while_serving_also_for_a_halted_line(tmp_path: Path) -> None:
    with Service(tmp_path / "runs/7f3a", 1) as service:
        code, output, _ = andon(tmp_path, "health")
        andon(tmp_path, "halt")
        halted, text, _ = andon(
            tmp_path, "health", "--address", service.address, "--format", "json"
        )

    assert (code, output) == (0, f"SERVING at {service.address}\n")
    assert halted == 0
    assert json.loads(text) == {
        "address": service.address,
        "service": "",
        "state": "SERVING",
        "problem": "",
    }


def test_health_imports_nothing_heavy(tmp_path: Path) -> None:
    with announced(tmp_path) as (told, _):
        checked = subprocess.run(
            [sys.executable, "-c", IMPORTED_BY_HEALTH, told["address"]],
            capture_output=True,
            text=True,
            check=False,
        )

    assert (checked.returncode, checked.stderr) == (0, "")
