"""Run directories: names that are free, and where a run is served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from andon_server.runs import ServiceAddress, free_run_id, service_of, services, worker_log


def address(run_id: str, pid: int = 1) -> ServiceAddress:
    return ServiceAddress(
        address="127.0.0.1:7070", metrics_url="http://x", run_id=run_id, journal="j", pid=pid
    )


def left_in(runs: Path, run_id: str, at_s: int) -> None:
    run_dir = runs / run_id
    run_dir.mkdir(parents=True)
    address(run_id).write(run_dir)
    os.utime(run_dir / "service.json", (at_s, at_s))


def test_an_address_survives_its_json() -> None:
    assert ServiceAddress.from_json(address("7f3a").to_json()) == address("7f3a")


def test_what_a_later_release_adds_to_an_address_is_left_out() -> None:
    told = json.loads(address("7f3a").to_json()) | {"something": "new"}

    assert ServiceAddress.from_json(json.dumps(told)) == address("7f3a")


@pytest.mark.parametrize("text", ["", "nothing", "[]", "{}", '{"address": 1}'])
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        ServiceAddress.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "1"}, {"pid": -1}, {"pid": 2**40}, {"pid": True}, {"address": 5},
        {"address": "\ud800:1"}, {"run_id": "\x1b[2J"}, {"board_url": None}, {"journal": ["j"]},
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_service_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    told = json.loads(address("7f3a").to_json()) | change
    (tmp_path / "service.json").write_text(json.dumps(told))

    assert service_of(tmp_path) is None


def test_what_is_no_small_file_is_no_address_and_nobody_waits_for_it(tmp_path: Path) -> None:
    for name in ("pipe", "nested", "binary", "folder"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "service.json")
    (tmp_path / "nested" / "service.json").write_text("[" * 50_000)
    (tmp_path / "binary" / "service.json").write_bytes(b"\xff\x00")
    (tmp_path / "folder" / "service.json").mkdir()
    left_in(tmp_path, "whole", at_s=1)

    assert [service.run_id for service in services(tmp_path)] == ["whole"]


def test_the_first_run_is_the_one_served_last(tmp_path: Path) -> None:
    left_in(tmp_path, "aaaa", at_s=200)
    left_in(tmp_path, "bbbb", at_s=300)
    left_in(tmp_path, "cccc", at_s=100)

    assert [service.run_id for service in services(tmp_path)] == ["bbbb", "aaaa", "cccc"]


def test_without_runs_none_is_served(tmp_path: Path) -> None:
    assert services(tmp_path) == []


def test_a_process_that_is_gone_does_not_serve() -> None:
    assert address("7f3a", pid=os.getpid()).alive
    assert not address("7f3a", pid=2**22 + 1).alive
    assert not address("7f3a", pid=0).alive, "nobody knows which process serves it"


def test_a_run_id_is_not_given_twice(tmp_path: Path) -> None:
    ids = {free_run_id(tmp_path) for _ in range(20)}

    assert all(len(run_id) == 4 for run_id in ids)
    assert len(ids) > 10


def test_each_worker_has_a_log_of_its_own(tmp_path: Path) -> None:
    assert worker_log(tmp_path, 3) == tmp_path / "worker-3.log"
