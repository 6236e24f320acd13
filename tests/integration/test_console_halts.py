"""A person stops a line and answers its halts, from another terminal than the run's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from andon.protocol.records import RecordKind
from andon_cli.app import main
from andon_cli.commands.operate import operator_name
from andon_coordinator.transport.reader import JournalReader, RecordedHalt
from integration.fixtures.console import (
    PROTOCOL_WORKER,
    andon,
    announced,
    finish,
    lines_until,
    processes_of,
    start_warm,
)
from integration.fixtures.launched import Launched
from integration.harness import Service
from unit.andon_cli.pipes import end_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

HALTED = (
    "HALTED at step 3 (epoch 1, positions 0 to 3): worker 1 sent nan in w[0] (block 0). "
    "No weight moved."
)
LAST_ANSWER = "andon resume --drop"
WAITING = ("--obey-on-halt", "--nan-at", "3", "--nan-once")


@contextmanager
def halted_run(folder: Path, *script: str) -> Iterator[tuple[Launched, list[str]]]:
    """A run of two workers that is halted at step 3, and its output so far."""
    process = start_warm(
        folder,
        *("run", "--workers", "2", "--run-id", "7f3a", "--report", "r.json"),
        *(PROTOCOL_WORKER, *(script or ("6", *WAITING))),
        room="service",
    )
    try:
        yield process, lines_until(process, LAST_ANSWER)
    finally:
        process.terminate()
        process.communicate()


def served(folder: Path) -> Service:
    """A line that waits for a worker, in a folder where `andon` finds it."""
    return Service(folder / "runs/7f3a", 1, "--run-id", "7f3a")


def halts_of(folder: Path) -> list[RecordedHalt]:
    with JournalReader(folder / "runs/7f3a/journal.sqlite") as journal:
        return journal.halts()


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


def test_a_halt_reads_the_same_everywhere_and_its_answer_counts_also_if_nobody_reads_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with halted_run(tmp_path) as (run, seen):
        _, table, _ = andon(tmp_path, "status")
        _, costs, _ = andon(tmp_path, "top", "--once", "--format", "json")
        _, status, _ = andon(tmp_path, "status", "--format", "json")
        _, past, _ = andon(tmp_path, "history")
        _, history, _ = andon(tmp_path, "history", "--format", "json")
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            resumed = end_of(["resume"], patch)
        ended, _, _ = finish(run)

    [halt] = halts_of(tmp_path)
    told = json.loads(status)["halt"]
    workers = json.loads(costs)["workers"]
    [known] = json.loads(history)
    assert seen[-4:] == [
        HALTED,
        "        andon resume          try the step again",
        "        andon resume --skip   leave its 4 samples out, and record them as skipped",
        "        andon resume --drop 1 go on without worker 1",
    ]
    assert HALTED in table.splitlines()
    assert f"      {HALTED} Not answered." in past.splitlines()
    assert known["state"] == "halted"
    assert told == {name: known["halts"][0][name] for name in told}
    assert (halt.evidence.message, halt.evidence.at_unix_s) == (told["message"], told["at_unix_s"])
    assert str(halt.evidence.key) == told["key"]
    assert [sorted(each["worker"] for each in workers), json.loads(costs)["step"]] == [[0, 1], 2]
    assert (resumed, ended) == (141, 0)


@pytest.mark.parametrize(
    ("flags", "said", "answer"),
    [
        ((), "resumed: step 3, attempt 1\n", "retry"),
        (
            ("--skip",),
            "resumed: step 3, with the next samples; its own are recorded as skipped\n",
            "skip",
        ),
    ],
)
def test_f_dp_002_resume_answers_in_the_operators_name_and_the_run_completes(
    tmp_path: Path, flags: tuple[str, ...], said: str, answer: str
) -> None:
    with halted_run(tmp_path) as (run, _):
        code, output, errors = andon(tmp_path, "resume", *flags)
        run_code, rest, _ = finish(run)

    assert (code, output, errors) == (0, said, "")
    assert run_code == 0
    assert "resumed: step 3" in rest
    report = report_of(tmp_path)
    assert (report["steps"], report["complete"]) == (6, True)
    assert len(set(report["digests"].values())) == 1
    assert [halt["answer"] for halt in report["halts"]] == [answer]
    [halt] = halts_of(tmp_path)
    assert halt.operator == operator_name()


def test_a_run_goes_on_without_a_dropped_worker_and_its_journal_can_be_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with halted_run(tmp_path, "6", "--obey-on-halt", "--nan-at", "3") as (run, _):
        code, output, _ = andon(tmp_path, "resume", "--drop", "1")
        run_code, rest, errors = finish(run)

    assert (code, output) == (0, "resumed: step 3, attempt 1, without worker 1\n")
    assert (run_code, errors) == (0, "")
    assert "worker 1 was dropped: the others go on without it" in rest.splitlines()
    assert "dismissed: an operator dropped this worker" in rest
    report = report_of(tmp_path)
    assert (report["steps"], report["complete"], list(report["digests"])) == (6, True, ["0"])
    with JournalReader(tmp_path / "runs/7f3a/journal.sqlite") as journal:
        rosters = [e.record.roster for e in journal.chain() if e.record.kind is RecordKind.STEP]
        assert rosters == [(0, 1)] * 2 + [(0,)] * 4
        assert journal.ledger_faults() == []
    _, past, _ = andon(tmp_path, "history")
    assert past.splitlines()[1].split()[-1] == "complete"
    assert f"Answered by {operator_name()}: drop 1." in past
    assert processes_of(tmp_path) == []

    monkeypatch.chdir(tmp_path)
    main(["show", "7f3a", "3", "--format", "json"])
    step = json.loads(capsys.readouterr().out)
    main(["show"])
    shown = capsys.readouterr().out
    main(["export", "--output", "steps.csv"])
    with (tmp_path / "steps.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    [record] = step["records"]
    assert (record["workers"], record["attempt"], record["kept"]) == ([0], 1, True)
    assert [part["positions"] for part in record["contributions"]] == [[[0, 4]]]
    assert {each["kind"] for each in step["events"]} >= {"halted", "answered", "attempt"}
    assert "6 steps, 24 samples" in shown
    assert "one attempt came to nothing" in shown
    assert [(row["step"], row["workers"], row["attempt"]) for row in rows] == [
        ("1", "2", "0"), ("2", "2", "0"), ("3", "1", "1"), ("4", "1", "0"), ("5", "1", "0"),
        ("6", "1", "0"),
    ]  # fmt: skip
    assert [row["loss"] for row in rows] == list(map(repr, report["losses"]))


def test_halt_stops_a_run_before_a_commit_and_tells_who_and_why(tmp_path: Path) -> None:
    script = (PROTOCOL_WORKER, "1000000", "--obey-on-halt")
    run = start_warm(tmp_path, "run", "--run-id", "7f3a", *script, room="service")
    try:
        lines_until(run, "[worker 0] step 2 ")
        code, output, errors = andon(tmp_path, "halt", "--reason", "loss looks odd")
        _, text, _ = andon(tmp_path, "status", "--format", "json")
        seen = lines_until(run, LAST_ANSWER)
        again, _, refused = andon(tmp_path, "halt")
        resumed, _, _ = andon(tmp_path, "resume")
        lines_until(run, "resumed: step ")
    finally:
        run.terminate()
        run.communicate()

    status = json.loads(text)
    step = status["halt"]["step"]
    told = f"{operator_name()} pulled the cord: loss looks odd"
    assert (code, output, errors) == (0, f"halted at step {step}, before its commit\n", "")
    assert (status["state"], status["step"]) == ("HALTED", step - 1)
    assert (status["halt"]["reason"], status["halt"]["message"]) == ("operator", told)
    assert any(
        line.startswith(f"HALTED at step {step}") and line.endswith(f": {told}. No weight moved.")
        for line in seen
    )
    assert (again, resumed) == (4, 0)
    assert "the line is halted already" in refused


def test_of_two_runs_none_is_guessed_and_the_named_one_is_answered_in_json(tmp_path: Path) -> None:
    named = ("--run", "7f3a", "--format", "json")
    with served(tmp_path), Service(tmp_path / "runs/beef", 1, "--run-id", "beef"):
        guessed, _, why = andon(tmp_path, "halt")
        code, text, _ = andon(tmp_path, "halt", "--reason", "odd", *named)
        resumed, status, _ = andon(tmp_path, "resume", *named)

    halt = json.loads(text)
    assert guessed == 2
    assert "2 runs are served from here (beef, 7f3a)" in why
    assert "--run ID" in why
    assert (code, resumed) == (0, 0)
    assert (halt["id"], halt["reason"], halt["step"]) == (1, "operator", 1)
    assert json.loads(status)["halt"] is None


def test_where_nothing_is_halted_there_is_nothing_to_answer(tmp_path: Path) -> None:
    with announced(tmp_path, "--run-id", "7f3a"):
        code, output, errors = andon(tmp_path, "resume")

    assert (code, output) == (4, "")
    assert "run 7f3a is not halted (FORMING, step 0)" in errors


def test_an_answer_that_can_not_be_given_is_refused_and_the_halt_stands(tmp_path: Path) -> None:
    why = {
        ("--halt", "7"): "the present halt is 1, not 7",
        ("--drop", "5"): "there is no worker 5",
        ("--skip",): "there is no step whose samples could be skipped",
    }

    with served(tmp_path):
        andon(tmp_path, "halt")
        answers = {answer: andon(tmp_path, "resume", *answer) for answer in why}
        _, status, _ = andon(tmp_path, "status", "--format", "json")

    for answer, (code, output, errors) in answers.items():
        assert (code, output) == (4, ""), answer
        assert why[answer] in errors
        assert "andon status" in errors
    assert json.loads(status)["state"] == "HALTED"


@pytest.mark.parametrize("verb", ["halt", "resume", "health"])
def test_a_dead_address_is_told_with_the_remedy(tmp_path: Path, verb: str) -> None:
    code, output, errors = andon(tmp_path, verb, "--address", "127.0.0.1:9")

    assert code == (1 if verb == "health" else 5)
    assert "127.0.0.1:9" in output + errors
    assert "andon serve" in output + errors
    assert "Traceback" not in errors


def test_a_run_that_took_over_the_newest_ones_port_is_not_answered(tmp_path: Path) -> None:
    with announced(tmp_path, "--run-id", "7f3a") as (told, _):
        other = tmp_path / "other"
        (other / "runs/beef").mkdir(parents=True)
        (other / "runs/beef/service.json").write_text(json.dumps({**told, "run_id": "beef"}))
        code, _, errors = andon(other, "halt")

    assert code == 4
    assert "run 7f3a is served here, not beef" in errors
