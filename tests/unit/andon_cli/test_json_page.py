"""The page about JSON names what the commands print, no more and no less."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from andon.host.audit_files import AuditRecord
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_cli.auditing.judging import Difference
from andon_cli.auditing.scope import Scope
from andon_cli.client import (
    CheckpointStatus,
    Hardware,
    LineStatus,
    RankStatus,
    ReducerStatus,
    SessionStatus,
    StepTimes,
    WorkerStatus,
)
from andon_cli.commands.audit import AuditOutcome
from andon_cli.commands.doctor.findings import findings_json, ok
from andon_cli.commands.export import STEP_COLUMNS, json_pieces
from andon_cli.commands.history import history_json
from andon_cli.commands.run_facts import RunFacts, StepFacts, reading
from andon_cli.commands.status import lost_json, status_json
from andon_cli.commands.top import WorkerCosts, top_json
from andon_cli.drawing.picture import Lost
from andon_cli.reporting.facts import ReportFacts
from andon_coordinator.core.events import LeaveReason
from andon_server.past_runs import read_runs
from andon_server.runs import JOURNAL, ServiceAddress
from unit.andon_cli.books import DIGESTS, Book
from unit.project.documents import ROOT

_PAGE = (ROOT / "docs/json.md").read_text("utf-8")
_NAME = re.compile(r"`([a-z_0-9]+)`")

STATUS = LineStatus(
    run_id="7f3a",
    state="RUNNING",
    workers=(
        WorkerStatus(
            worker=0, live=True, hardware=Hardware(), timings=StepTimes(), samples_per_second=1.0
        ),
    ),
    halt=HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=1),
    reducers=(ReducerStatus("alpha:1"),),
    checkpoints=CheckpointStatus(),
    session=SessionStatus(ranks=(RankStatus(rank=0),)),
)


def documented(section: str, table: int = 0) -> set[str]:
    """The names in the first column of a table of a section."""
    text = re.split(rf"^## {section}$", _PAGE, flags=re.M)[1].split("\n## ")[0]
    tables = re.findall(r"^\|.*\|\n(?:\|.*\|\n)+", text, re.M)
    rows = tables[table].splitlines()[2:]
    return {name for row in rows for name in _NAME.findall(row.split("|")[1])}


def named(section: str, start: str) -> set[str]:
    """The names in the line of a section that begins like this."""
    text = re.split(rf"^## {section}$", _PAGE, flags=re.M)[1].split("\n## ")[0]
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return set(_NAME.findall(line.removeprefix(start)))


def names(value: dict[str, Any]) -> set[str]:
    return set(value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a halt and its answer."""
    folder = tmp_path / "runs" / "7f3a"
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL)
    book.found()
    book.step(1, 2.0)
    book.halt(HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=2))
    book.answer(1, HaltAnswer.RETRY, None, "lea@alpha")
    book.step(2, 1.0)
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()
    return folder


def test_the_fields_of_a_status() -> None:
    told = json.loads(status_json(STATUS))

    assert names(told) == documented("`andon status`")
    [worker] = told["workers"]
    assert names(worker) == documented("`andon status`", 1)
    for part in ("hardware", "timings"):
        row = next(
            line for line in _PAGE.splitlines() if line.startswith("|") and f"`{part}`" in line
        )
        assert names(worker[part]) <= set(_NAME.findall(row))
    assert names(told["session"]) == documented("`andon status`", 2)
    assert names(told["session"]["ranks"][0]) == documented("`andon status`", 3)
    assert names(told["checkpoints"]) == named("`andon status`", "| `checkpoints` |") - {"null"}
    assert names(told["halt"]) == documented("Halts")
    lost = json.loads(lost_json("7f3a", Lost("gone", 1.0, 9.0), 3.0))
    assert lost == {"run_id": "7f3a", "state": "LOST", "problem": "gone", "lost_s": 2.0}


def test_the_fields_of_top() -> None:
    told = json.loads(top_json(STATUS, WorkerCosts()))

    assert names(told) == documented("`andon top`")
    [worker] = told["workers"]
    own = named("`andon top`", "Of each of the `workers`:")
    assert names(worker) == own | documented("`andon top`", 1)


def test_the_fields_of_the_history(run: Path) -> None:
    [told] = json.loads(history_json(read_runs(run.parent)))

    assert names(told) == documented("`andon history`")
    [halt] = told["halts"]
    assert names(halt) == documented("Halts") | {"answer", "operator", "dropped"}


def test_the_fields_of_a_run_and_of_a_step(run: Path) -> None:
    told = RunFacts.read(run).fields()

    assert names(told) == documented("`andon show`")
    for part in ("loss", "step_s"):
        assert names(told[part]) == named("`andon show`", f"| `{part}` |")
    [first, _] = told["workers"]
    assert names(first) | names(first["departures"][0]) == named("`andon show`", "| `workers` |")
    assert names(told["events"][0]) == named("`andon show`", "| `events` | what happened:")
    step = StepFacts.read(run, 2).fields()
    assert names(step) == documented("`andon show`", 1)
    [record] = step["records"]
    assert names(record) == documented("`andon show`", 2)
    row = "| `contributions` | of each worker:"
    assert names(record["contributions"][0]) == named("`andon show`", row)


def test_the_fields_of_an_export_and_the_columns_of_its_table(run: Path) -> None:
    with reading(run) as reader:
        told = json.loads("".join(json_pieces(reader, run)))

    assert names(told) == documented("`andon export`")
    assert names(told["steps"][0]) == set(STEP_COLUMNS)
    assert set(STEP_COLUMNS) == named("`andon export`", "The columns of the CSV are")
    assert names(told["run"]) == documented("`andon show`") - {"scalars"}


def test_the_fields_of_a_report(run: Path) -> None:
    told = ReportFacts.read(run).fields()

    assert names(told) == documented("`andon report`") | documented("`andon show`")
    for part in ("spent", "rolled_back"):
        assert names(told[part]) <= named("`andon report`", f"| `{part}` |")
    assert names(told["presences"][0]) <= named("`andon report`", "| `presences` |")
    assert names(told["steps_curve"][0]) == named("`andon report`", "| `steps_curve` |")


def test_the_fields_of_an_audit() -> None:
    origin = AuditRecord(key=Key(1, 1), kind=RecordKind.INITIAL, step=0, cursor=Cursor(0, 0))
    plan = RunPlan(global_batch=4)
    scope = Scope(run_id="7f3a", plan=plan, layout="", origin=origin, last=2)
    difference = Difference(step=1, what="loss", recorded="1", recomputed="2")

    told = AuditOutcome(scope=scope, difference=difference).fields()

    assert names(told) == documented("`andon audit`")
    has = named("`andon audit`", "The `difference` has")
    assert names(told["difference"]) == has


def test_the_fields_of_the_small_commands() -> None:
    told = json.loads(findings_json([ok("python", "3.11")]))

    assert names(told) == documented("`andon doctor`")
    assert named("`andon doctor`", "| `findings` |") - {"ok", "warn", "fail"} == names(
        told["findings"][0]
    )
    announced = {each.name for each in fields(ServiceAddress)}
    assert announced == named("`andon serve`", "`andon serve --announce` prints one object once")
