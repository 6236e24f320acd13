"""The demo: its script alone, and on a line of two workers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import run_warm
from integration.harness import clean_environment
from integration.nursery import nursery

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "examples/shakespeare.py"
QUICK = ["--evaluation-pieces", "32", "--evaluate-every", "5", "--batch-size", "8"]


@pytest.mark.timeout(240)
def test_the_demo_learns_on_two_workers_and_leaves_all_it_promises(tmp_path: Path) -> None:
    code, output, errors = run_warm(
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


def test_the_demo_leaves_the_same_bits_alone_and_on_two_workers(tmp_path: Path) -> None:
    common = [str(SCRIPT), *QUICK, "--micro-batch-size", "3"]
    folder = tmp_path / "alone"
    call = [*common, "--steps", "3", "--run-dir", str(folder)]
    (tmp_path / "andon.toml").write_text("[run]\nsame-bits = true\n")

    alone = nursery("trainer").start(
        call, clean_environment(ANDON_SAME_BITS="1"), tmp_path / "output"
    )
    code, output, errors = run_warm(tmp_path, "run", "--workers", "2", "--steps", "3", *common)

    assert alone.wait(110) == 0, alone.output.read_text()
    assert code == 0, output + errors
    (on_line,) = (tmp_path / "runs").glob("*/model.safetensors")
    assert on_line.read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (on_line.parent / "sample.txt").read_text() == (folder / "sample.txt").read_text()
    assert (folder / "loss.png").exists()
    said = re.findall("step 3: validation loss.*", alone.output.read_text())
    assert said
    assert said[0] in output
