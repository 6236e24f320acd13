"""Resuming: which checkpoint a run goes on from, and what the console hands on."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from andon.host.errors import ResumeRefused, UsageError
from andon.host.manifest import MANIFEST, CheckpointFacts, Manifest, checkpoint_folder
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_cli.app import read_config
from andon_cli.config import RunConfig
from andon_cli.launching.processes import worker_environment
from andon_cli.settings import as_flags
from andon_coordinator.core.effects import SaveDeparture, SaveRecord
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.step_results import StepContribution, StepResult
from andon_coordinator.transport.store import JournalStore
from andon_server.book import RunBook
from andon_server.folder_search import search_folder
from andon_server.resuming import find_resumption, search_history
from unit.andon_cli.books import DIGESTS, TERM, Book

LATER = 2 * TERM


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of five steps, with checkpoints of steps 2 and 4."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs/7f3a"
    run_dir.mkdir(parents=True)
    book = Book(run_dir / "journal.sqlite")
    book.found()
    for step in range(1, 6):
        book.step(step, 1.0)
    book.leave(0, LeaveReason.INTERRUPTED, b"")
    book.leave(1, None, b"")
    book.close()
    for step in (2, 4):
        checkpoint(run_dir, step, Key(TERM, step + 1))
    return run_dir


def checkpoint(run_dir: Path, step: int, head: Key) -> Path:
    folder = checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True, exist_ok=True)
    facts = CheckpointFacts(
        head=head,
        step=step,
        cursor=Cursor(0, 4 * step),
        digest="",
        plan=RunPlan(global_batch=4, seed=7),
    )
    files = {"model.safetensors": b"weights", "model.json": b"{}"}
    for name, data in {**files, MANIFEST: Manifest.of(facts, files).to_bytes()}.items():
        (folder / name).write_bytes(data)
    return folder


def roll_back(run_dir: Path, step: int) -> None:
    """The run is resumed after `step`."""
    store = JournalStore(run_dir / "journal.sqlite", "7f3a", sync="normal", clock=lambda: 1000.0)
    store.begin_term(LATER)
    mark = Record(
        Key(LATER, 1), Key(TERM, step + 1), RecordKind.MARK, step, Cursor(0, 4 * step), ()
    )
    store.save_record(SaveRecord(mark, rolls_back=True))
    store.close()


@pytest.mark.parametrize("name", ["7f3a", "runs/7f3a"])
def test_a_run_goes_on_from_its_newest_checkpoint_by_id_or_by_folder(
    run_dir: Path, name: str
) -> None:
    found = find_resumption(name)

    assert (found.run_id, found.facts.head) == ("7f3a", Key(TERM, 5))
    assert found.checkpoint == run_dir / "checkpoints/step-00000004"


def test_the_checkpoint_of_a_step_can_be_chosen(run_dir: Path) -> None:
    assert find_resumption("7f3a", 2).facts.step == 2


def test_a_checkpoint_of_a_history_that_was_rolled_back_is_passed_over(run_dir: Path) -> None:
    roll_back(run_dir, 2)

    assert find_resumption("7f3a").facts.step == 2


def test_a_checkpoint_newer_than_all_that_the_journal_has_is_taken(run_dir: Path) -> None:
    checkpoint(run_dir, 9, Key(LATER, 10))

    assert find_resumption("7f3a").facts.step == 9


def test_without_a_journal_the_newest_is_taken_and_the_folder_names_the_run(run_dir: Path) -> None:
    for file in run_dir.glob("journal.sqlite*"):
        file.unlink()

    found = find_resumption("7f3a")

    assert (found.run_id, found.facts.step) == ("7f3a", 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [(b"weightz", "holds other bytes"), (b"weigh", "has 5 bytes and was written with 7")],
)
def test_other_bytes_are_refused_and_the_file_is_named(
    run_dir: Path, change: bytes, said: str
) -> None:
    file = run_dir / "checkpoints/step-00000004/model.safetensors"
    file.write_bytes(change)

    with pytest.raises(ResumeRefused, match=f"model.safetensors {said}") as refused:
        find_resumption(str(run_dir))

    assert refused.value.exit_code == 4


def test_a_service_finds_the_newest_checkpoint_of_the_history_that_is_whole(run_dir: Path) -> None:
    rolled_back = checkpoint(run_dir, 5, Key(TERM - 1, 6))
    found = search_history(run_dir)
    checkpoint(run_dir, 4, Key(TERM, 5)).joinpath("model.safetensors").write_bytes(b"weightz")
    before = search_history(run_dir)

    assert rolled_back.exists()
    assert found.newest is not None
    assert before.newest is not None
    assert (found.newest[1].step, before.newest[1].step) == (4, 2)
    assert found.damaged == ()
    [damaged] = before.damaged
    assert damaged.startswith("step-00000004/model.safetensors holds other bytes: SHA-256 ")


def test_a_service_says_what_is_wrong_with_each_checkpoint(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    newest, older = (run_dir / "checkpoints" / f"step-0000000{step}" for step in (4, 2))
    (newest / "state.json").unlink()
    (older / "model.safetensors").write_bytes(b"weigh")

    found = search_history(run_dir)
    search_folder("7f3a", run_dir, 5, lambda *_: None).join()

    assert found.newest is None
    assert found.damaged == (
        "step-00000004/state.json is missing",
        "step-00000002/model.safetensors has 5 bytes and was written with 7",
    )
    assert (
        "has no whole checkpoint of it (step-00000004/state.json is missing; step-00" in caplog.text
    )


def test_what_a_service_finds_is_logged_and_reported(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told: list[tuple[str, int | None]] = []

    def report(folder: str, step: int | None, damaged: tuple[str, ...]) -> None:
        told.append((folder, step))

    search_folder("7f3a", run_dir, 5, report).join()
    shutil.rmtree(run_dir / "checkpoints")
    search_folder("7f3a", run_dir, 5, report).join()

    assert told == [(str(run_dir), 4), (str(run_dir), None)]
    first, second = (record.getMessage() for record in caplog.records)
    assert "at step 5; its newest whole checkpoint is of step 4: the line goes on from" in first
    assert "has no checkpoint of it" in second


def test_a_journal_that_cant_be_read_is_said_and_nothing_is_reported(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "journal.sqlite").write_bytes(b"no database")

    search_folder("7f3a", run_dir, 5, lambda *_: pytest.fail("nothing was found")).join()

    assert "can't be read" in caplog.text


def test_a_run_without_a_checkpoint_is_refused_with_the_remedy(run_dir: Path) -> None:
    with pytest.raises(ResumeRefused, match=r"no checkpoint of step 3 .*\(there: 4, 2\)"):
        find_resumption("7f3a", 3)


def test_a_run_that_is_not_there_is_a_mistake_at_the_console(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="there is no run abcd"):
        find_resumption("abcd")


def test_the_service_and_the_workers_are_told_where_to_go_on(run_dir: Path) -> None:
    config = read_config(
        ["run", "--workers", "3", "--resume", "7f3a", "--keep-checkpoints", "5", "train.py"], {}
    )
    assert isinstance(config, RunConfig)
    assert config.service is not None
    line = {"ANDON_ADDRESS": "", "ANDON_RUN_ID": "7f3a", "ANDON_RUN_DIR": ""}

    flags = as_flags(config.service)
    worker = worker_environment(config, 0, base={}, line=line, master_port=1)

    assert f"--resume-from={TERM}:5" in flags
    assert worker["ANDON_RESUME"] == str(run_dir / "checkpoints/step-00000004")
    assert (worker["ANDON_SEED"], worker["ANDON_KEEP_CHECKPOINTS"]) == ("7", "5")


def test_a_checkpoint_that_was_rotated_away_is_not_named_to_who_starts_again(
    run_dir: Path,
) -> None:
    config = read_config(["run", "--resume", "7f3a", "train.py"], {})
    assert isinstance(config, RunConfig)
    line = {"ANDON_ADDRESS": "", "ANDON_RUN_ID": "7f3a", "ANDON_RUN_DIR": ""}
    (run_dir / "checkpoints/step-00000004").rename(run_dir / "gone")

    worker = worker_environment(config, 0, base={"ANDON_RESUME": "old"}, line=line, master_port=1)

    assert "ANDON_RESUME" not in worker


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--resume", "7f3a", "--run-id", "b"], "--run-id is the resumed run's own"),
        (["--resume", "7f3a", "--join", "127.0.0.1:7"], "--resume belongs to the line"),
        (["--resume-step", "2"], "chooses a checkpoint of --resume"),
    ],
)
def test_flags_that_contradict_a_resumption_are_refused(
    run_dir: Path, argv: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read_config(["run", *argv, "train.py"], {})


def test_who_left_before_the_run_was_resumed_does_not_count_for_its_end(run_dir: Path) -> None:
    roll_back(run_dir, 2)
    book = Book(run_dir / "journal.sqlite", at=2000.0, term=LATER + 1)
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    assert RunBook.read(run_dir / "journal.sqlite").complete


def test_who_was_lost_before_the_last_step_does_not_make_a_run_incomplete(run_dir: Path) -> None:
    journal = run_dir / "journal.sqlite"
    store = JournalStore(journal, "7f3a", sync="normal", clock=lambda: 500.0)
    store.begin_term(LATER)
    alone = Record(Key(LATER, 1), Key(TERM, 6), RecordKind.STEP, 6, Cursor(0, 24), (0,))
    batch = PositionRange(20, 24)
    part = StepContribution(
        worker=0, rank=0, positions=(batch,), samples=4, weight=4.0, loss_sum=1.0
    )
    result = StepResult(
        epoch=0, batch=batch, loss=1.0, samples=4, weight=4.0, attempt=0, seconds=1.0,
        contributions=(part,),
    )  # fmt: skip
    store.save_record(SaveRecord(alone, result))
    before = RunBook.read(journal).complete
    store.save_departure(SaveDeparture(0, LeaveReason.COMPLETE, "", 6, DIGESTS[0]))
    store.close()

    assert not before
    assert RunBook.read(journal).complete


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"[" * 50_000, b'{"sha256": 1}'])
def test_a_checkpoint_whose_manifest_is_none_is_refused_by_name(
    run_dir: Path, content: bytes
) -> None:
    (checkpoint_folder(run_dir, 4) / MANIFEST).write_bytes(content)

    with pytest.raises(ResumeRefused, match=r"step-00000004/state\.json"):
        find_resumption("7f3a")


def test_a_checkpoint_with_a_pipe_or_a_folder_for_a_file_keeps_nobody_waiting(
    run_dir: Path,
) -> None:
    newest, earlier = checkpoint_folder(run_dir, 4), checkpoint_folder(run_dir, 2)
    (newest / MANIFEST).unlink()
    os.mkfifo(newest / MANIFEST)
    name = next(iter(Manifest.read(earlier).files))
    (earlier / name).unlink()
    (earlier / name).mkdir()

    with pytest.raises(ResumeRefused, match=r"state\.json is no file"):
        find_resumption("7f3a")
    assert search_history(run_dir).newest is None


def test_a_manifest_does_not_name_files_outside_its_folder(run_dir: Path) -> None:
    folder = checkpoint_folder(run_dir, 4)
    manifest = Manifest.read(folder)
    outside = Manifest(manifest.facts, {"../../../secret": (1, "00")})
    (folder / MANIFEST).write_bytes(outside.to_bytes())

    with pytest.raises(ResumeRefused, match="names a file outside its folder"):
        find_resumption("7f3a")
