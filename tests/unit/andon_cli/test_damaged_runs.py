"""Damaged runs: each command that reads a run's folder says what is wrong, and soon."""

from __future__ import annotations

import io
import json
import os
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.app import main
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.store import JournalError, JournalStore
from andon_server.runs import JOURNAL
from unit.andon_cli.books import Book

Damage = Callable[[Path], None]

NAN = HaltEvidence(
    id=1, reason=HaltReason.NON_FINITE_LOSS, step=2, worker=1, message="worker 1's loss is nan"
)
READERS = (
    ["show"],
    ["show", "bad", "2"],
    ["export", "bad", "--format", "json"],
    ["export", "bad"],
)


def book_of(runs: Path, run_id: str) -> Path:
    """The journal of a run of three steps, with one row at least in each table."""
    folder = runs / run_id
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL, run_id, at=1e9)
    book.found()
    for step in (1, 2, 3):
        book.step(step, 3.0 - step / 2)
        book.log(0, step, val=1.0 / step)
    book.halt(NAN)
    book.drop(1, 1, "ann@alpha")
    book.note(1, RunEventKind.STARTED, None, "a service")
    book.close()
    return folder / JOURNAL


def sql(*statements: str) -> Damage:
    """What somebody does who opens the journal with another program."""

    def damage(journal: Path) -> None:
        with closing(sqlite3.connect(journal)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()

    return damage


def endless(table: str) -> Damage:
    """A view in the place of a table, whose rows never end."""

    def damage(journal: Path) -> None:
        with closing(sqlite3.connect(journal)) as database:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        first = ", ".join(f"1 AS {name}" for name in columns)
        sql(
            f"DROP TABLE {table}",
            f"CREATE VIEW {table} AS WITH RECURSIVE endless AS (SELECT {first} UNION ALL "
            "SELECT * FROM endless) SELECT * FROM endless",
        )(journal)

    return damage


def as_text(table: str, column: str, value: str) -> Damage:
    """A value of a kind that a coordinator would not write."""
    return sql(
        f"CREATE TABLE other AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE other RENAME TO {table}",
        f"UPDATE {table} SET {column} = {value}",
    )


def cut(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-9000])


def overwritten(journal: Path) -> None:
    journal.write_bytes(b"not a database" * 1000)


DAMAGES = {
    "cut": cut,
    "overwritten": overwritten,
    "a view that never ends": endless("records"),
    "another view that never ends": endless("run"),
    "a virtual table": sql("CREATE VIRTUAL TABLE more USING fts5(a)"),
    "a column that is computed": sql("ALTER TABLE totals ADD COLUMN more TEXT AS (hex(steps))"),
    "no run": sql("DELETE FROM run"),
    "no totals": sql("DELETE FROM totals"),
    "a short key": sql("UPDATE records SET key = x'00'"),
    "a kind of its own": sql("UPDATE records SET kind = 'NONSENSE'"),
    "a roster that is none": sql("UPDATE records SET roster = '{'"),
    "another roster that is none": sql("UPDATE records SET roster = '[[1]]'"),
    "a time that is none": sql("UPDATE run SET created_at = 1e300"),
    "a run without a name": as_text("run", "run_id", "x'ff'"),
    "a step that is text": as_text("records", "step", "'three'"),
    "a loss that is text": as_text("records", "loss", "'low'"),
    "text that is none": sql("UPDATE halts SET evidence = CAST(x'ff' AS TEXT)"),
    "evidence that is none": sql("UPDATE halts SET evidence = '[]'"),
    "a message that is none": sql("UPDATE halts SET evidence = json_set(evidence, '$.message', 5)"),
    "a reason that is none": sql("UPDATE halts SET evidence = json_set(evidence, '$.reason', 5)"),
    "nested evidence": sql(f"UPDATE halts SET evidence = '{'[' * 100_000}'"),
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, in the current folder; two are in it."""
    monkeypatch.chdir(tmp_path)
    book_of(tmp_path / "runs", "good")
    book_of(tmp_path / "runs", "bad")
    os.utime(tmp_path / "runs" / "good", (1, 1))
    return tmp_path / "runs"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_journal_is_an_error_that_names_it_and_hides_no_other_run(
    runs: Path, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(runs / "bad" / JOURNAL)

    codes = [main(command) for command in READERS]
    said = capsys.readouterr().err.splitlines()
    assert main(["history", "--format", "json"]) == 0
    listed = {each["run_id"]: each for each in json.loads(capsys.readouterr().out)}

    assert ExitCode.FAILED in codes
    assert set(codes) <= {ExitCode.COMPLETE, ExitCode.FAILED}
    assert len(said) == codes.count(ExitCode.FAILED)
    assert all("runs/bad/journal.sqlite" in line for line in said)
    assert listed["good"]["steps"] == 3
    assert main(["history"]) == 0


def test_flipped_bits_make_no_command_fail_in_another_way(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = runs / "bad" / JOURNAL
    whole, chance = journal.read_bytes(), random.Random(7)
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(20):
            data[chance.randrange(100, len(data))] ^= 1 << chance.randrange(8)
        journal.write_bytes(bytes(data))

        codes = {main(command) for command in ([*READERS, ["history"]])}

        assert codes <= {ExitCode.COMPLETE, ExitCode.FAILED, ExitCode.USAGE}


def test_a_service_refuses_a_journal_whose_rows_never_end(runs: Path) -> None:
    journal = runs / "bad" / JOURNAL
    endless("run")(journal)

    with pytest.raises(JournalError, match="'run' is no table"):
        JournalStore(journal, "bad", sync="normal", clock=lambda: 0.0)


def test_what_a_terminal_cant_show_is_escaped(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql(r"""UPDATE halts SET evidence = json_set(evidence, '$.message', json('"\ud800\u001b"'))""")(
        runs / "bad" / JOURNAL
    )

    assert main(["show"]) == 0
    assert main(["history"]) == 0

    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "HALTED at step 2" in said


def test_text_that_a_locale_lacks_is_escaped_in_the_output(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))

    assert main(["show", "good"]) == 0

    assert rb"\u2588" in shown.getvalue()
