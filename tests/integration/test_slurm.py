"""deploy/slurm/andon.sbatch on a real SLURM: a job that is cut short writes a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from integration.harness import SCRIPTS
from integration.slurm import Slurm, missing

pytestmark = [pytest.mark.integration, pytest.mark.slurm]

JOB = Path(__file__).resolve().parents[2] / "deploy/slurm/andon.sbatch"
STEPS = 200


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_job_near_its_time_limit_writes_a_checkpoint_and_is_queued_again(tmp_path: Path) -> None:
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
        requeued, said = slurm.job(number), log.read_text("utf-8")

    assert requeued["Restarts"] == "1"
    again = re.search(r"goes on later from (\S+/checkpoints/step-(\d+))$", said, re.MULTILINE)
    assert again is not None, said
    assert (Path(again[1]) / "state.json").exists()
    assert 5 <= int(again[2]) < STEPS
    began = re.findall(r"^slot (\d), number (\d) here, began at step (\d+)$", said, re.MULTILINE)
    assert sorted(began) == [("0", "0", "0"), ("1", "1", "0")]
