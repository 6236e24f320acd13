"""A run and its steps, as `andon show` tells them from the journal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from andon.host.errors import UsageError
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon_cli.app import main, read_config
from andon_cli.commands.run_facts import RunFacts, StepFacts, find_folder
from andon_cli.commands.show import run_lines, step_lines
from andon_cli.questions import ShowConfig, ShowSettings
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.run_events import RunEventKind
from andon_server.runs import JOURNAL
from unit.andon_cli.books import DIGESTS, Book

NAN = HaltEvidence(
    id=1, reason=HaltReason.NON_FINITE_LOSS, step=3, worker=1, message="worker 1's loss is nan"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, which is not complete, in `runs/` of the current folder."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "7f3a"
    folder.mkdir(parents=True)
    return folder


def book_of(folder: Path, steps: int = 4) -> Book:
    book = Book(folder / JOURNAL, at=1e9)
    book.found()
    for step in range(1, steps + 1):
        book.step(step, 3.0 - step / 2)
    return book


def test_a_run_is_told_from_its_plan_to_its_last_event(folder: Path) -> None:
    book = book_of(folder)
    book.halt(NAN)
    book.answer(1, HaltAnswer.SKIP, None, "lea@alpha")
    book.log(0, 2, val=0.5)
    book.log(1, 2, val=0.3)
    book.log(0, 4, val=0.2)
    book.note(1, RunEventKind.JOINED, 1, "from beta")
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    lines = run_lines(RunFacts.read(folder))

    assert lines[0].startswith("run 7f3a  stopped  2001-09-09 01:46:40")
    assert "steps     4 steps, 16 samples; in 8.0s, 2.0 samples/s with all waits" in lines
    assert "time      2.0s a step (median), the slowest 2.0s (step 4)" in lines
    assert "loss      2.500 to 1.000  █▆▃▁  lowest 1.000 (step 4)" in lines
    at = lines.index("worker  steps  samples  from    went")
    assert lines[at + 1 : at + 3] == [
        "0       4      8.0      1 to 4  complete after step 2, weights 9c1e049c",
        "1       4      8.0      1 to 4  -",
    ]
    at = lines.index("logged  last  lowest  highest  steps")
    assert lines[at + 1] == "val     0.2   0.2     0.4      2      █▁"
    assert (
        "HALTED at step 3: worker 1's loss is nan. No weight moved. Answered by lea@alpha: skip."
        in lines
    )
    assert lines[-1].split() == ["09-09", "01:46:48", "step", "2", "joined", "worker", "1",
                                 "from", "beta"]  # fmt: skip


def test_a_run_that_nobody_joined_is_shown_too(folder: Path) -> None:
    Book(folder / JOURNAL).close()

    facts = RunFacts.read(folder)

    assert run_lines(facts)[1] == "nobody has joined it yet"
    assert facts.fields()["loss"] == {
        "first": None, "last": None, "lowest": None, "lowest_step": None,
    }  # fmt: skip


def test_a_run_whose_journal_is_being_written_is_shown_as_far_as_it_is(folder: Path) -> None:
    book = book_of(folder, steps=2)

    before = RunFacts.read(folder).totals.steps
    book.step(3, 1.5)
    after = RunFacts.read(folder).totals.steps
    book.close()

    assert (before, after) == (2, 3)


def test_a_step_is_told_with_who_computed_which_samples(folder: Path) -> None:
    book = book_of(folder)
    book.halt(NAN)
    book.log(1, 3, val=0.25)
    book.close()

    lines = step_lines(StepFacts.read(folder, 3))

    assert lines[0] == "run 7f3a  step 3"
    assert lines[1].startswith("record    1.00000000/4 after 1.00000000/3, 2001-09-09 01:46:46")
    assert lines[2] == "batch     epoch 0, 8 to 11: 4 samples, weight 4"
    assert lines[3] == "time      2.0s, at the first attempt"
    at = lines.index("worker  rank  samples  weight  loss  positions")
    assert lines[at + 1 : at + 3] == [
        "0       0     2        2       1.5   8 to 9",
        "1       1     2        2       1.5   10 to 11",
    ]
    assert "logged    val  0.25 (worker 1)" in lines
    assert any(line.startswith("HALTED at step 3") for line in lines)


def test_a_step_that_was_rolled_back_is_shown_beside_the_one_that_counts(folder: Path) -> None:
    book = book_of(folder)
    book.roll_back(to_step=2)
    book.step(3, 9.0, after_roll_back=True)
    book.close()

    step, run = StepFacts.read(folder, 3), RunFacts.read(folder)
    only_before = StepFacts.read(folder, 4)

    assert [
        (kept, record["loss"]) for record in step.fields()["records"] for kept in [record["kept"]]
    ] == [
        (False, 1.5),
        (True, 9.0),
    ]
    assert sum("ROLLED BACK" in line for line in step_lines(step)) == 1
    assert [kept for _, kept in only_before.records] == [False]
    assert run.totals.losses == [2.5, 2.0, 9.0]
    assert [(each.worker, each.steps, each.last_step) for each in run.workers] == [
        (0, 3, 3),
        (1, 3, 3),
    ]


def test_a_loss_that_is_no_number_is_null_in_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = book_of(folder, steps=1)
    book.step(2, math.nan)
    book.log(0, 2, val=math.nan)
    book.close()

    assert main(["show", "7f3a", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert told["loss"] == {"first": 2.5, "last": None, "lowest": 2.5, "lowest_step": 1}
    assert told["scalars"][0]["last"] is None


def test_a_step_that_was_never_committed_is_refused_with_those_that_were(folder: Path) -> None:
    book_of(folder).close()

    with pytest.raises(UsageError, match="run 7f3a has no step 9: its steps are 1 to 4"):
        StepFacts.read(folder, 9)


def test_a_halt_at_a_step_that_was_never_committed_can_be_looked_up(folder: Path) -> None:
    book = book_of(folder, steps=2)
    book.halt(NAN)
    book.close()

    lines = step_lines(StepFacts.read(folder, 3))

    assert lines[1] == "it is not committed"
    assert lines[2].endswith("No weight moved. Not answered.")


def test_a_run_is_found_by_its_id_its_folder_and_its_journal(folder: Path) -> None:
    book_of(folder).close()

    found = [
        find_folder(name).resolve() for name in ("", "7f3a", str(folder), f"{folder}/{JOURNAL}")
    ]

    assert found == [folder.resolve()] * 4
    with pytest.raises(UsageError, match="there is no run nope"):
        find_folder("nope")


def test_without_any_run_show_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="there is no run under runs/"):
        find_folder("")


@pytest.mark.parametrize(
    ("argv", "config"),
    [
        ([], ShowConfig(settings=ShowSettings())),
        (["7f3a"], ShowConfig(settings=ShowSettings(), run="7f3a")),
        (
            ["7f3a", "118", "--format", "json"],
            ShowConfig(settings=ShowSettings(format="json"), run="7f3a", step=118),
        ),
    ],
)
def test_the_words_are_a_run_and_a_step(argv: list[str], config: ShowConfig) -> None:
    assert read_config(["show", *argv], {}) == config


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["7f3a", "x"], "a step is a number"),
        (["7f3a", "1", "2"], "one run and one step at a time"),
    ],
)
def test_other_words_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_config(["show", *argv], {})
