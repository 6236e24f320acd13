"""deploy/slurm/andon.sbatch on a real SLURM: a job that is cut short goes on from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from andon_coordinator.transport.reader import JournalReader
from integration.harness import SCRIPTS
from integration.slurm import Slurm, missing

pytestmark = [pytest.mark.integration, pytest.mark.slurm]

JOB = Path(__file__).resolve().parents[2] / "deploy/slurm/andon.sbatch"
STEPS = 200


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_job_near_its_time_limit_writes_a_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    with Slurm(tmp_path / "slurm") as slurm:
        # None of its own accord.
        every = f"--export=ALL,ANDON_CHECKPOINT_EVERY={10 * STEPS}"
        command = [every, str(JOB), str(SCRIPTS / "batch_job.py"), str(STEPS)]
        options = ["--parsable", "--ntasks=2", "--overcommit", f"--chdir={tmp_path}"]
        number = slurm.run("sbatch", *options, *command).strip()
        log = tmp_path / f"andon-{number}.log"
        slurm.wait(lambda: log.exists() and "at step 5" in log.read_text(), "no step 5")

        slurm.run("scancel", "--batch", "--signal=USR1", number)

        slurm.wait(lambda: slurm.job(number)["JobState"] == "PENDING", "it was not requeued")
        # SLURM lets a requeued job wait for two minutes.
        slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
        slurm.wait(
            lambda: slurm.job(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"),
            "it did not end",
        )
        ended, said = slurm.job(number), log.read_text("utf-8")

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert len(re.findall(r"^andon.sbatch: run slurm-\d+, 2 workers", said, re.MULTILINE)) == 2
    again = re.search(r"goes on later from \S+/checkpoints/step-(\d+)$", said, re.MULTILINE)
    assert again is not None, said
    written = int(again[1])
    assert 5 <= written < STEPS
    began = re.findall(r"^slot (\d), number (\d) here, began at step (\d+)$", said, re.MULTILINE)
    assert sorted(began[:2]) == [("0", "0", "0"), ("1", "1", "0")]
    assert sorted(began[2:]) == [("0", "0", str(written)), ("1", "1", str(written))]
    assert said.count(f"ended at step {STEPS}\n") == 2
    with JournalReader(tmp_path / f"runs/slurm-{number}/journal.sqlite") as journal:
        assert not journal.ledger_faults()
