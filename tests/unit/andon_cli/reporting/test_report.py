"""The page of a stormy run, read by someone who was not there."""

from __future__ import annotations

import html
import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from andon.host.errors import UsageError
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon_cli.app import main, read_config
from andon_cli.config import LASTING
from andon_cli.kept_command import KeptCommand
from andon_cli.reporting.facts import ReportFacts
from andon_cli.reporting.html_page import html_page
from andon_cli.reporting.page import Curve, Page, Section
from andon_cli.reporting.sections import page_of
from andon_cli.settings import as_flags
from andon_coordinator.core.run_events import RunEventKind
from andon_server.runs import JOURNAL
from unit.andon_cli.books import Book

NAN = HaltEvidence(
    id=1,
    reason=HaltReason.NON_FINITE_GRADIENT,
    step=3,
    worker=1,
    parameter="head.weight",
    element=(3, 7),
    value="nan",
    message="worker 1 sent nan in head.weight[3, 7]",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stormy run 7f3a, and 81c0, which was calm."""
    runs = tmp_path_factory.mktemp("reports") / "runs"
    for name, build in (("7f3a", _stormy), ("81c0", _calm)):
        (runs / name).mkdir(parents=True)
        book = Book(runs / name / JOURNAL, name, at=1e9)
        build(book)
        book.close()
    command = ["python", "train.py", "--lr", "3e-4"]
    kept = KeptCommand.of(command, {}, folder=runs, answer_encoding="")
    kept.write(runs / "7f3a")
    return runs


def _calm(book: Book) -> None:
    book.found()
    for step in range(1, 5):
        book.step(step, 3.0 - step / 2)
    book.log(0, 4, val=0.25)


def _stormy(book: Book) -> None:
    book.note(1, RunEventKind.STARTED, None, "the run began")
    book.note(2, RunEventKind.JOINED, 0, "on alpha")
    book.note(3, RunEventKind.JOINED, 1, "on beta")
    book.found()
    book.step(1, 3.0)
    book.step(2, 2.0)
    book.halt(NAN)
    book.note(4, RunEventKind.HALTED, 1, f"non_finite_gradient: {NAN.message}", step=3)
    book.set_clock(1e9 + 24)
    book.answer(1, HaltAnswer.SKIP, None, "lea@alpha")
    book.note(5, RunEventKind.ANSWERED, None, "skip by lea@alpha", step=3)
    book.skip(3, halt=1, operator="lea@alpha")
    book.note(6, RunEventKind.LOST, 1, "lost: its connection broke", step=2)
    book.step(3, 1.5, roster=(0,), at_position=12)
    book.set_clock(1e9 + 56)
    book.note(7, RunEventKind.STARTED, None, "the service goes on after step 3", step=3)
    book.note(8, RunEventKind.JOINED, 1, "on <b>gamma</b>", step=3)
    book.note(9, RunEventKind.ATTEMPT, None, "attempt 2: worker 1: no answer", step=4)
    book.note(10, RunEventKind.CHECKPOINT, 0, "checkpoints/step-00000003", step=3)
    book.note(11, RunEventKind.NOTICE, 1, "SIGTERM", step=3)
    book.note(12, RunEventKind.LEFT, 1, "interrupted: notice: SIGTERM", step=3)
    book.log(0, 3, val=0.5)


QUESTIONS = {
    "What was trained, by which command?": "python train.py --lr 3e-4",
    "How far did it come, and how does it stand?": "Run 7f3a: stopped after 3 steps",
    "How did the loss go?": "3 at first, 1.5 at last, lowest 1.5 (step 3)",
    "Why did it halt, who, and where?": "worker 1 sent nan in head.weight[3, 7]",
    "Who answered, and how?": "Answered by lea@alpha: skip.",
    "Which samples were left out, and why?": "8 to 11 | 4 | the answer to halt 1 | lea@alpha",
    "Which worker was lost, and did it come back?": "lost: its connection broke",
    "How many left because their machine went?": "gone by notice | 1 |",
    "How long did it stand still?": "halted | 20.0 |",
    "Why were steps tried again?": "worker 1: no answer | 1 |",
    "How do I go on?": "It has no checkpoint, so it can only begin again.",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_who_was_not_there_finds_each_answer(
    runs: Path, question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {
        form: _told(capsys, str(runs / "7f3a"), "--format", form) for form in ("markdown", "html")
    }

    assert QUESTIONS[question] in said["markdown"].replace("\\", "")
    words = [each for each in QUESTIONS[question].split(" | ") if each.strip(" |")]
    text = html.unescape(re.sub(r"<[^>]+>", " ", said["html"]))
    assert all(each.strip(" |") in text for each in words)


def test_the_parts_of_the_time_are_those_that_the_journal_shows(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(_told(capsys, str(runs / "7f3a"), "--format", "json", "--price", "2"))

    # Three steps of 2 s, a halt of 20 s, a service that was away from step 3 at 26 s to 56 s.
    assert told["spent"] == {
        **{"total_s": 56.0, "training_s": 6.0, "halted_s": 20.0, "away_s": 30.0, "rest_s": 0.0}
    }
    # Nobody says that worker 0 came again, so its stay ended as the service went.
    assert [(each["worker"], each["seconds"]) for each in told["presences"]] == [
        (0, 26.0),
        (1, 24.0),
    ]
    assert told["cost"] == pytest.approx(2 * 50 / 3600)
    assert told["ledger_faults"] == 0
    assert told["command"] == ["python", "train.py", "--lr", "3e-4"]


def test_a_step_that_halts_again_says_how_long_each_halt_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Book(tmp_path / JOURNAL, "7f3a", at=1e9)
    book.found()
    for number, (began, took) in enumerate([(10, 5), (20, 60)], 1):
        book.set_clock(1e9 + began)
        book.halt(replace(NAN, id=number, step=1))
        book.note(2 * number, RunEventKind.HALTED, 1, NAN.message, step=1)
        book.set_clock(1e9 + began + took)
        book.answer(number, HaltAnswer.RETRY, None, "lea@alpha")
        book.note(2 * number + 1, RunEventKind.ANSWERED, None, "retry by lea@alpha", step=1)
    book.set_clock(1e9 + 100)
    book.halt(replace(NAN, id=3, step=1))
    book.note(6, RunEventKind.HALTED, 1, NAN.message, step=1)
    book.close()

    told = _told(capsys, str(tmp_path)).splitlines()

    halts = [line for line in told if "HALTED at step 1" in line]
    assert [line.split(" | ")[-1] for line in halts] == ["5.0s |", "1m00s |", "- |"]


def test_a_run_goes_on_with_the_settings_that_it_had(tmp_path: Path) -> None:
    book = Book(tmp_path / JOURNAL, "7f3a", at=1e9)
    _calm(book)
    book.close()
    asked = ["--workers=3", "--expect=4", "--steps=9", "--report=r.json", "train.py"]
    settings = read_config(["run", *asked], {}).settings
    flags = ["--workers=3", *as_flags(settings, LASTING)]
    kept = KeptCommand.of(["python", "train.py"], {}, folder=tmp_path, answer_encoding="",
                          flags=flags)  # fmt: skip
    kept.write(tmp_path)
    facts = replace(ReportFacts.read(tmp_path), checkpoint_step=4)

    sections = {each.title: each for each in page_of(facts).sections}

    command, _ = sections["What to do now"].commands[0]
    _, _, *given = shlex.split(command)
    assert read_config(["run", *given[:-3], given[-1]], {}).settings == replace(
        settings, report=None
    )
    assert given[-3:] == ["--resume", str(tmp_path), "train.py"]


def test_commands_name_a_folder_as_a_shell_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "it's my run"
    folder.mkdir()
    book = Book(folder / JOURNAL, "7f3a", at=1e9)
    _calm(book)
    book.close()

    told = _told(capsys, str(folder))

    command = next(line for line in told.splitlines() if "andon show" in line).split("`")[1]
    assert shlex.split(command) == ["andon", "show", str(folder), "STEP"]


def test_two_runs_stand_beside_each_other(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(capsys, str(runs / "7f3a"), str(runs / "81c0"))

    assert "| steps | 3 | 4 |" in told
    assert "| halts | 1 | 0 |" in told
    assert told.count("- 81c0: `") == 4


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in {"meta", "br"} and not self.rawdata[self.offset :].startswith("/"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_is_one_whole_document_without_a_script_or_an_address(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"

    _told(capsys, str(runs / "7f3a"), "--format", "html", "-o", str(page))

    tags = _Tags()
    tags.feed(page.read_text("utf-8"))
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "b"}
    assert "http" not in page.read_text("utf-8").replace("http-equiv", "")
    assert page.stat().st_mode & 0o077 == 0


def test_a_curve_has_a_gap_where_there_is_no_number() -> None:
    points = ((1, 1.0), (2, None), (3, 2.0), (4, 4.0))
    curve = Curve(name="loss", series=(("7f3a", points),), marks=((3, "worker 1 <lost>"),))

    drawn = html_page(Page(title="x", sections=(Section(title="y", curves=(curve,)),)))

    assert drawn.count("<polyline") == 2
    assert "worker 1 &lt;lost&gt;" in drawn
    assert 'aria-label="loss: from 1 to 4, steps 1 to 4"' in drawn


def test_three_runs_are_refused() -> None:
    with pytest.raises(UsageError, match="two beside each other"):
        read_config(["report", "a", "b", "c"], {})


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 0
    return capsys.readouterr().out
