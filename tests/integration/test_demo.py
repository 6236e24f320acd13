"""The demo: its script alone, and on a line of two workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import andon, run_warm
from integration.harness import clean_environment
from integration.nursery import nursery

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "examples/shakespeare.py"
QUICK = ["--evaluation-pieces", "32", "--evaluate-every", "5", "--batch-size", "8"]


@pytest.mark.timeout(240)
def test_the_demo_learns_on_two_workers_and_leaves_all_it_promises(tmp_path: Path) -> None:
    code, output, errors = andon(
        tmp_path,
        *("run", "--workers", "2", "--steps", "10", "--report", "report.json"),
        *(str(SCRIPT), *QUICK, "--checkpoint-every", "5"),
    )

    assert code == 0, output + errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"][-1] < report["losses"][0] - 0.5
    assert len(report["digests"]) == 2
    assert len(set(report["digests"].values())) == 1
    run = tmp_path / "runs" / report["run_id"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text("utf-8").strip()
    assert (run / "journal.sqlite").exists()
    final = load_file(run / "model.safetensors")
    checkpoint = load_file(run / "checkpoints/step-00000010/model.safetensors")
    assert final.keys() == checkpoint.keys()
    assert all(torch.equal(final[name], checkpoint[name]) for name in final)
    assert "step 10: validation loss" in output
    with JournalReader(run / "journal.sqlite") as journal:
        logged = {(each.step, each.worker): each.value for each in journal.scalars("val/loss")}
    assert logged.keys() == {(step, worker) for step in (5, 10) for worker in (0, 1)}
    assert f"step 10: validation loss {logged[10, 0]:.3f}" in output

    code, output, errors = run_warm(
        tmp_path, *("run", "--resume", report["run_id"], "--steps", "12", str(SCRIPT), *QUICK)
    )

    assert code == 0, output + errors
    assert "step 12: validation loss" in output
    assert "complete: 12 steps" in output


def test_the_demo_runs_alone(tmp_path: Path) -> None:
    call = [str(SCRIPT), "--steps", "5", *QUICK, "--run-dir", str(tmp_path)]

    process = nursery("trainer").start(call, clean_environment(), tmp_path / "output")

    assert process.wait(110) == 0, process.output.read_text()
    assert (tmp_path / "sample.txt").read_text("utf-8").strip()
    assert (tmp_path / "loss.png").exists()
