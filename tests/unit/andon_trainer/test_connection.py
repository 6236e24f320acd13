"""How a worker looks for its coordinator, and for how long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_trainer.config import LineConfig
from andon_trainer.core.events import ControlLost
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.control import connection
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.path import Inbox

COMPLETE = {"run_id": "7f3a", "complete_at_unix_s": 100.0}


@pytest.mark.parametrize(
    ("content", "run_id", "started_at", "expected"),
    [
        (COMPLETE, "7f3a", 99.0, True),
        (COMPLETE, "", 99.0, True),
        (COMPLETE, "7f3a", 101.0, False),
        (COMPLETE, "48bc", 99.0, False),
        ({"run_id": "7f3a", "complete_at_unix_s": 0.0}, "7f3a", 99.0, False),
        ({"run_id": "7f3a"}, "7f3a", 99.0, False),
        ({"run_id": "7f3a", "complete_at_unix_s": "soon"}, "7f3a", 99.0, False),
        ([COMPLETE], "7f3a", 99.0, False),
        (None, "7f3a", 99.0, False),
    ],
    ids=[
        "complete", "run-not-named", "before-this-process-began", "another-run", "not-complete",
        "older-service", "no-number", "no-object", "no-file",
    ],
)  # fmt: skip
def test_a_run_counts_as_complete_if_its_service_completed_it_since_this_process_began(
    tmp_path: Path, content: Any, run_id: str, started_at: float, *, expected: bool
) -> None:
    if content is not None:
        (tmp_path / "service.json").write_text(json.dumps(content))

    found = connection._completed_since(tmp_path, run_id, started_at)

    assert found is expected


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        ({}, "7f3a", True),
        ({}, "48bc", False),
        ({}, "", False),
        ({}, "../runs/7f3a", False),
        ({"run_dir": Path("elsewhere")}, "7f3a", False),
    ],
    ids=["named", "another-run", "not-named", "no-name", "its-own-folder"],
)
def test_a_worker_that_was_given_no_folder_looks_where_services_keep_theirs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    named: str,
    *,
    expected: bool,
) -> None:
    (tmp_path / "runs" / "7f3a").mkdir(parents=True)
    complete = {"run_id": named, "complete_at_unix_s": time.time() + 60}
    (tmp_path / "runs" / "7f3a" / "service.json").write_text(json.dumps(complete))
    monkeypatch.chdir(tmp_path)
    config = LineConfig(address="127.0.0.1:7070", run_id=named, **given)
    searching = connection.Connection(config, Inbox())

    with pytest.raises(JoinRefused, match="is over") if expected else nullcontext():
        searching._refuse_if_complete()


def test_a_process_began_before_now_and_not_before_the_tests_were_written() -> None:
    began = connection._process_began_at()

    assert 1.7e9 < began <= time.time()


def test_a_reader_that_fails_for_an_unforeseen_reason_ends_the_stream_and_keeps_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class BrokenCall:
        cancelled = False

        def __iter__(self) -> Iterator[pb.TrainResponse]:
            yield pb.TrainResponse(probe=pb.Probe(number=7))
            raise RuntimeError("a bug")

        def cancel(self) -> None:
            self.cancelled = True

    call = BrokenCall()
    inbox = Inbox()
    inbox.follow(1)
    stream = ControlStream("127.0.0.1:1", inbox, 1, outbox=ScalarOutbox())
    vars(stream)["_call"] = call

    stream._read()
    lost = inbox.take(0.0)
    stream.close()

    assert isinstance(lost, ControlLost)
    assert lost.message == "what the coordinator sent could not be read: RuntimeError('a bug')"
    assert repr(stream.failure) == "RuntimeError('a bug')"
    assert "a bug" in caplog.text
    assert call.cancelled


def test_whoever_can_not_read_its_streams_waits_longer_each_time_and_then_gives_up() -> None:
    failures, bug = connection.ReadFailures(), RuntimeError("a bug")

    waits = [failures.wait_s(bug) for _ in range(3)]
    after_a_good_one = failures.wait_s(None), failures.wait_s(bug)
    after_a_long_one = failures.wait_s(bug, lived_s=61.0)
    while failures.wait_s(bug) is not None:
        pass

    assert waits == [0.05, 0.5, 5.0]
    assert (*after_a_good_one, after_a_long_one) == (0.0, 0.05, 0.05)
    assert failures.in_a_row == 5
