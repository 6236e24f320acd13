"""Resuming: a run that is killed in the middle of a step goes on exactly, told to or by itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from andon.host.manifest import Manifest, checkpoints_in, newest_whole, step_of
from andon.protocol.records import RecordKind
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from andon_trainer.state.checkpoint_files import save_checkpoint
from integration.fixtures.console import (
    Running,
    andon,
    finish,
    lines_until,
    processes_of,
    run_warm,
    start,
    start_warm,
    worker_of,
)
from integration.fixtures.disk import small_disk_at
from integration.fixtures.launched import Launched
from integration.harness import SCRIPTS, clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SCRIPT = str(SCRIPTS / "resumable.py")
STEPS = 11
EVERY = ("--checkpoint-every", "3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two workers, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ("--workers", "2", "--run-id", "7f3a", *EVERY)
    code, output, errors = run_warm(folder, "run", *flags, SCRIPT, str(folder), str(STEPS))
    assert code == 0, output + errors
    return folder


@pytest.fixture(scope="module")
def killed_at_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle of step 8, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    run_and_kill(folder, at=8)
    return folder


@pytest.fixture
def killed(killed_at_8: Path, tmp_path: Path) -> Path:
    """A copy of that run, for this test only."""
    return shutil.copytree(killed_at_8, tmp_path / "run")


def run_and_kill(folder: Path, at: int) -> None:
    """Starts a run, and kills all its processes with SIGKILL while worker 1 computes step `at`."""
    process = start_warm(
        folder,
        *("run", "--workers", "2", "--run-id", "7f3a", *EVERY, SCRIPT, str(folder), str(STEPS)),
        *("--hold-at", str(at), "--slot", "1"),
    )
    lines_until(process, f"holding at step {at}")
    await_checkpoint(folder, (at - 1) // 3 * 3)
    kill_all(folder, process)


def await_checkpoint(folder: Path, step: int) -> None:
    """Returns once the checkpoint of a step is whole: it is written beside those that follow."""
    while step not in steps_kept(folder):
        time.sleep(0.01)


def kill_all(folder: Path, launcher: Running) -> None:
    """Sends SIGKILL to the launcher and to all processes that it started."""
    children = processes_below(launcher.pid)
    os.kill(launcher.pid, signal.SIGKILL)
    for pid in children:
        with suppress(ProcessLookupError):  # Some end by themselves once their launcher is gone.
            os.kill(pid, signal.SIGKILL)
    finish(launcher)
    while processes_of(folder):
        time.sleep(0.01)  # until the kernel has reaped them


def processes_below(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def resume(folder: Path, workers: int = 2, *flags: str, steps: int = STEPS) -> tuple[int, str]:
    code, output, errors = run_warm(
        folder,
        *("run", "--workers", str(workers), "--resume", "7f3a", "--report", "r.json", *EVERY),
        *(*flags, SCRIPT, str(folder), str(steps)),
    )
    return code, output + errors


def seen(folder: Path, slot: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"out-{slot}.json").read_text())
    return found


def weights(folder: Path, slot: int = 0) -> dict[str, torch.Tensor]:
    return load_file(folder / f"out-{slot}.safetensors")


def steps_kept(folder: Path) -> list[int]:
    return [step_of(each) for each in checkpoints_in(folder / "runs/7f3a")]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_run_goes_on_with_the_same_bits_on_as_many_workers(
    killed: Path, whole: Path
) -> None:
    code, output = resume(killed)

    assert code == 0, output
    assert "2 workers on " in output
    shown = [int(step) for step in re.findall(r"^step +(\d+)", output, re.MULTILINE)]
    assert shown == [*range(6, STEPS + 1)], "where it goes on, and what follows"
    assert seen(killed)["began"] == 6
    for slot in (0, 1):
        assert same_bits(weights(killed, slot), weights(whole, slot))
        assert seen(killed, slot)["average"] == seen(whole)["average"]
        assert seen(killed, slot)["losses"] == seen(whole)["losses"][6:]
    report = json.loads((killed / "r.json").read_text())
    assert report["losses"] == seen(whole)["losses"]
    assert (report["complete"], report["steps"]) == (True, STEPS)


def test_a_script_that_fails_before_a_resumed_run_has_a_step_is_not_started_again(
    killed: Path,
) -> None:
    script = killed / "fails.py"
    script.write_text("print('it begins')\nraise SystemExit(1)\n")

    code, output, errors = run_warm(
        killed, "run", "--workers", "1", "--resume", "7f3a", str(script)
    )

    assert code == 1
    assert "it starts again" not in output + errors


def test_another_number_of_workers_goes_on_and_the_ledger_stays_exact(
    killed: Path, whole: Path
) -> None:
    code, output = resume(killed, 3)

    assert code == 0, output
    for name, tensor in weights(whole).items():
        for slot in range(3):
            torch.testing.assert_close(weights(killed, slot)[name], tensor, rtol=0, atol=1e-5)
    with JournalReader(killed / "runs/7f3a/journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        chain = [entry.record for entry in journal.chain()]
        rolled_back = {entry.record.step for entry in journal.entries()} - {
            record.step for record in chain
        }
        rosters = [len(record.roster) for record in chain if record.kind is RecordKind.STEP]
        assert [r.step for r in chain if r.kind is RecordKind.STEP] == list(range(1, STEPS + 1))
        assert [r.step for r in chain if r.kind is RecordKind.MARK] == [6]
        assert len(journal.entries()) == len(chain) + 1, rolled_back  # step 7, as it was at first
    assert rosters == [2] * 6 + [3] * (STEPS - 6)


def test_a_run_that_is_resumed_from_an_older_checkpoint_and_killed_is_resumed_again(
    killed: Path, whole: Path
) -> None:
    older = ("--workers", "2", "--resume", "7f3a", "--resume-step", "3", *EVERY)
    hold = ("--hold-at", "10", "--slot", "1")
    process = start_warm(killed, "run", *older, SCRIPT, str(killed), str(STEPS), *hold)
    lines_until(process, "holding at step 10")
    await_checkpoint(killed, 9)
    kill_all(killed, process)

    code, output = resume(killed)

    assert code == 0, output
    assert seen(killed)["began"] == 9
    assert same_bits(weights(killed), weights(whole))
    with JournalReader(killed / "runs/7f3a/journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        marks = [entry.record for entry in journal.chain()]
    assert [each.step for each in marks if each.kind is RecordKind.MARK] == [3, 9]


def test_a_run_is_resumed_without_its_journal_from_the_checkpoint_alone(
    killed: Path, whole: Path
) -> None:
    for file in (killed / "runs/7f3a").glob("journal.sqlite*"):
        file.unlink()

    code, output = resume(killed)

    assert code == 0, output
    assert seen(killed)["began"] == 6
    assert same_bits(weights(killed), weights(whole))
    with JournalReader(killed / "runs/7f3a/journal.sqlite") as journal:
        assert [entry.record.step for entry in journal.chain()] == [7, 8, 9, 10, 11]
        assert journal.ledger_faults() == []


def test_a_complete_run_goes_further_and_one_that_is_done_just_ends(
    whole: Path, tmp_path: Path
) -> None:
    complete = shutil.copytree(whole, tmp_path / "run")

    further, _ = resume(complete, 1, steps=STEPS + 3)
    went = seen(complete)
    done, said = resume(complete, 1, steps=STEPS + 3)

    assert (further, went["began"], went["step"]) == (0, STEPS, STEPS + 3)
    assert (done, seen(complete)["losses"]) == (0, []), said


def test_a_changed_byte_is_refused_with_code_4_and_the_file_is_named(killed: Path) -> None:
    file = killed / "runs/7f3a/checkpoints/step-00000006/optimizers.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)

    code, output = resume(killed)

    assert code == 4
    assert "step-00000006/optimizers.safetensors holds other bytes" in output
    assert "--resume-step" in output


def test_a_whole_cluster_that_was_lost_goes_on_by_itself_from_its_newest_whole_checkpoint(
    killed: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir, away = killed / "runs/7f3a", tmp_path / "elsewhere"
    away.mkdir()
    (run_dir / "checkpoints/step-00000006/model.safetensors").write_bytes(b"damaged")
    flags = ("--workers", "2", "--run-id", "7f3a", "--run-dir", str(run_dir))
    ports = ("--port", "0", "--metrics-port", "0")

    service = start(killed, "serve", "--announce", *ports, *flags)
    (greeting,) = lines_until(service, "{")
    address = json.loads(greeting)["address"]
    reads = worker(killed, 0, address, ANDON_RUN_DIR=str(run_dir))
    # Another host's folder has no checkpoint: that worker gets the state of the first one.
    finds_none = worker(away, 1, address, ANDON_RUN_DIR=str(away))
    said = [finish(each) for each in (reads, finds_none)]
    service.send_signal(signal.SIGTERM)
    warnings = finish(service)[2]

    assert [code for code, *_ in said] == [0, 0], said
    assert "step-00000006 is left out" in said[0][2]
    assert "line_went_back step=3 lost=7" in warnings
    assert (seen(killed)["began"], seen(away, 1)["began"]) == (3, 3)
    assert same_bits(weights(killed), weights(whole))
    assert same_bits(weights(away, 1), weights(whole))
    log = (run_dir / "service.log").read_text()
    assert "at step 7; its newest whole checkpoint is of step 3: the line goes on from" in log
    with JournalReader(run_dir / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        chain = [entry.record for entry in journal.chain()]
        assert [r.step for r in chain if r.kind is RecordKind.STEP] == list(range(1, STEPS + 1))
        assert [r.step for r in chain if r.kind is RecordKind.MARK] == [3]
        assert journal.halts() == []
        events = journal.run_events()
    assert [each.text for each in events if each.kind is RunEventKind.WENT_BACK] == [
        "went on after step 3, which worker 0 brought: no worker held step 7"
    ]


def test_workers_that_are_all_killed_at_once_go_on_from_the_newest_whole_checkpoint(
    whole: Path, tmp_path: Path
) -> None:
    """The service lives, and knows who held the head; the launcher, that nobody else has it."""
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", *EVERY, SCRIPT, str(tmp_path), str(STEPS)),
        *("--hold-at", "8", "--slot", "1"),
    )
    lines_until(process, "holding at step 8")
    await_checkpoint(tmp_path, 6)
    for pid in [worker_of(tmp_path, slot=slot) for slot in (0, 1)]:
        os.kill(pid, signal.SIGKILL)
    code, output, errors = finish(process)

    assert code == 0, output + errors
    assert "from the checkpoint of step 6, since no worker has the line's state any more" in output
    assert seen(tmp_path, 1)["began"] == 6
    assert same_bits(weights(tmp_path), weights(whole))
    with JournalReader(tmp_path / "runs/7f3a/journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        assert journal.halts() == []
        chain = [entry.record for entry in journal.chain()]
        events = journal.run_events()
    assert [r.step for r in chain if r.kind is RecordKind.STEP] == list(range(1, STEPS + 1))
    assert [r.step for r in chain if r.kind is RecordKind.MARK] == [6]
    (back,) = [each.text for each in events if each.kind is RunEventKind.WENT_BACK]
    assert back.startswith("went on after step 6")
    assert back.endswith("no worker held step 7")


def worker(folder: Path, slot: int, address: str, **environment: str) -> Launched:
    """Starts the script as an engine does that starts it again and again."""
    line = {"ANDON_ADDRESS": address, "ANDON_RUN_ID": "7f3a", "ANDON_RESUME": "latest"}
    given = {**line, "ANDON_CHECKPOINT_EVERY": "3", "RANK": str(slot), **environment}
    command = [SCRIPT, str(folder), str(STEPS)]
    return Launched("trainer", command, clean_environment(**given), folder)


def test_sigusr1_and_ctrl_c_to_andon_run_write_a_checkpoint_after_the_present_step(
    tmp_path: Path,
) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", SCRIPT, str(tmp_path), "100000"),
    )
    lines_until(process, "/100000  loss")
    process.send_signal(signal.SIGUSR1)
    while not (asked := checkpoints_in(tmp_path / "runs/7f3a")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process)

    assert code == 130, output + errors
    newest, *_ = checkpoints_in(tmp_path / "runs/7f3a")
    assert 0 < step_of(asked[0]) < step_of(newest) < 100000
    assert "interrupted: the workers write a checkpoint and end" in output
    command = f"andon run --workers=2 --resume 7f3a {SCRIPT} {tmp_path} 100000"
    assert f"go on from its newest checkpoint: {command}" in output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint folder on a separate file system, with room for one checkpoint."""
    with small_disk_at(tmp_path / "runs/7f3a/checkpoints", "80k") as disk:
        yield disk


def test_a_full_disk_halts_the_line_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", *EVERY, SCRIPT, str(tmp_path), str(STEPS)),
    )
    # It was cut at step 6, and fails beside a step that follows.
    said = "\n".join(lines_until(process, "HALTED at step"))
    present = [step_of(folder) for folder in checkpoints_in(small_disk.parent)]
    drafts = list(small_disk.glob(".step-*"))
    Manifest.read(small_disk / "step-00000003").verify(small_disk / "step-00000003")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    answered = andon(tmp_path, "resume")
    code, output, errors = finish(process)

    assert "worker 0 could not write a checkpoint: No space left on device" in said
    assert (present, drafts) == ([3], [])
    assert answered[0] == 0
    assert code == 0, output + errors
    newest, *others, first = [step_of(each) for each in checkpoints_in(small_disk.parent)]
    assert (newest, first) == (11, 3)
    assert set(others) & {7, 8, 9}, "written after the answer, of the step that the line is at then"


def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    command = [str(SCRIPTS / "killed_writer.py"), str(tmp_path)]
    written, _, said = finish(Launched("trainer", command, clean_environment(), tmp_path))
    checkpoints = tmp_path / "checkpoints"
    left = {each.name.split(".")[-2]: each for each in checkpoints.glob(".*")}
    before = newest_whole(tmp_path)

    (parts := checkpoints / "step-00000003").mkdir()
    save_checkpoint(parts, {"rng": {}}, Manifest.read(checkpoints / "step-00000001").facts)

    assert written == -signal.SIGKILL, said
    assert list(left) == ["step-00000002"]
    assert before == checkpoints / "step-00000001"
    assert {each.name for each in checkpoints.iterdir()} == {"step-00000001", "step-00000003"}


def test_while_the_line_is_halted_no_checkpoint_goes(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--run-id", "7f3a", "--checkpoint-every", "1"),
        *("--keep-checkpoints", "1", SCRIPT, str(tmp_path), "2000"),
    )
    lines_until(process, "/2000  loss")
    assert andon(tmp_path, "halt")[0] == 0
    lines_until(process, "HALTED at step")
    with JournalReader(tmp_path / "runs/7f3a/journal.sqlite") as journal:
        last = journal.steps()
    while (kept := steps_kept(tmp_path))[:1] != [last]:
        time.sleep(0.01)  # rank 0 is writing it

    process.send_signal(signal.SIGINT)
    finish(process)

    assert kept == [last, last - 1]
    assert steps_kept(tmp_path) == kept
