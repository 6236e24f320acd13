"""Which line a command means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from andon.host.errors import LineUnreachable, UsageError
from andon_cli.target import Target, find_target
from andon_server.runs import ServiceAddress

HERE, GONE = os.getpid(), 2**22 + 1


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def serve(run_id: str, *, pid: int, at_s: int = 100, address: str = "") -> None:
    folder = Path("runs", run_id)
    folder.mkdir(parents=True)
    ServiceAddress(
        address=address or f"{run_id}.example:7070",
        metrics_url="",
        run_id=run_id,
        journal=f"{run_id}.sqlite",
        pid=pid,
    ).write(folder)
    os.utime(folder / "service.json", (at_s, at_s))


def test_an_address_is_taken_as_it_is_and_the_line_there_judges_the_run() -> None:
    assert find_target("alpha:7070", "7f3a") == Target("alpha:7070", "7f3a")


def test_the_only_run_that_is_served_is_meant_though_a_newer_one_was() -> None:
    serve("7f3a", pid=HERE, at_s=100)
    serve("beef", pid=GONE, at_s=200)

    assert find_target("") == Target("7f3a.example:7070", "7f3a")


def test_of_runs_at_one_address_only_the_newest_can_be_served() -> None:
    # As in containers, which begin to count processes anew: the old service seems to be alive.
    serve("7f3a", pid=HERE, at_s=100, address="127.0.0.1:1")
    serve("beef", pid=HERE, at_s=200, address="127.0.0.1:1")
    serve("c0de", pid=GONE, at_s=300)

    assert find_target("") == Target("127.0.0.1:1", "beef")


@pytest.mark.parametrize("named", ["beef", "runs/beef"])
def test_a_run_is_named_by_its_id_or_its_folder(named: str) -> None:
    serve("7f3a", pid=HERE)
    serve("beef", pid=HERE)

    assert find_target("", named) == Target("beef.example:7070", "beef")


def test_a_run_that_is_served_no_more_is_said_with_its_journal() -> None:
    serve("beef", pid=GONE)

    for named in ("", "beef"):
        with pytest.raises(LineUnreachable, match=r"beef,? is not served any more.*beef\.sqlite"):
            find_target("", named)


def test_a_run_that_never_was_is_a_mistake_of_the_flag() -> None:
    with pytest.raises(UsageError, match="there is no run beef"):
        find_target("", "beef")


def test_where_no_run_is_there_is_none_to_ask() -> None:
    with pytest.raises(LineUnreachable, match="there is no run under runs/ here"):
        find_target("")
