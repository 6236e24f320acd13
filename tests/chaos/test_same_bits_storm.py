"""Storms that change no bit: every step of every worker is that of a script that ran alone.

A line of the demo's GPT, or of a CNN with BatchNorm, dropout and a GradScaler, is shot at; then it
goes on from a checkpoint with other numbers of workers. The faults of a test's seed are printed.
ANDON_SAME_BITS_STORMS is the number of seeds of long storms; without it there is one short one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.transport.reader import JournalReader
from chaos.rig import ChaosLine, Program, chaos_line, events_of
from chaos.storm import TURN, WILD, plan_storm, strike_unevenly
from integration.harness import clean_environment
from integration.nursery import nursery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LONG = "ANDON_SAME_BITS_STORMS" in os.environ
SEEDS = range(1, 1 + int(os.environ.get("ANDON_SAME_BITS_STORMS", "1")))
FAULTS = 24 if LONG else 4
KINDS = {**WILD, "a newcomer, and kill it": 4}
POINTS = (
    *("assigned", "mid-compute", "before-blocks", "after-blocks"),
    *("before-apply", "after-apply"),
)
"""The points of a step at which a training loop can stop."""
FLAGS = ("--same-bits", "--shares", "balanced", "--max-workers", "5")
PATHS = ("tcp", "wire", "shared-memory")
PACE_S = 0.001
"""What a sample takes to compute beside its computation; the slow worker takes three times that."""
SCRIPT = Path(__file__).with_name("grain_worker.py")


@contextmanager
def line_of(folder: Path, kind: str, workers: int, *, resumes: bool) -> Iterator[ChaosLine]:
    """A line that goes on from the newest checkpoint verifies every other step."""
    folder.mkdir()
    variables = {"ANDON_RUN_DIR": str(folder.with_name("kept")), "ANDON_CHECKPOINT_EVERY": "5"}
    if resumes:
        variables["ANDON_RESUME"] = "latest"
    with chaos_line(
        folder,
        workers,
        *FLAGS,
        *(("--verify", "0.5") if resumes else ()),
        pace_s=PACE_S,
        paths=PATHS,
        variables=variables,
        program=Program(script=SCRIPT, imports="trainer", spec={"kind": kind}),
    ) as line:
        yield line


def alone(folder: Path, kind: str, steps: int) -> list[dict[str, Any]]:
    """What a script that runs alone logs."""
    folder.mkdir()
    spec = folder / "spec.json"
    spec.write_text(
        json.dumps(
            {"folder": str(folder), "finish": str(folder / "finish"), "kind": kind, "steps": steps}
        )
    )
    environment = clean_environment(PYTHONPATH=str(Path(__file__).parents[1]))
    process = nursery("trainer").start([str(SCRIPT), str(spec)], environment, folder / "output")
    assert process.wait(200) == 0, process.output.read_text()
    return events_of(folder / "log.jsonl")


def judge(line: ChaosLine, expected: list[dict[str, Any]]) -> None:
    """Compares every step and evaluation of every worker, and what the journal has."""
    known = {(each["event"], each["step"]): each for each in expected}
    for log in (events_of(each) for each in line.folder.glob("worker-*/log.jsonl")):
        assert log
        for event in log:
            assert event == known[event["event"], event["step"]]
    with JournalReader(line.journal) as journal:
        norms = [(each.step, each.value) for each in journal.scalars("norm")]
        assert journal.ledger_faults() == []
        assert journal.halts() == []
    assert norms
    assert all(value == known["applied", step]["norm"] for step, value in norms)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_whatever_dies_joins_or_freezes_every_step_has_the_bits_of_a_script_alone(
    tmp_path: Path, kind: str, seed: int
) -> None:
    stages = [(3, plan_storm(seed, FAULTS, KINDS, POINTS)), (2, [])]
    if LONG:
        stages.append((4, plan_storm(-seed, TURN, KINDS, POINTS)))
    sys.stderr.write("\n".join(str(fault) for _, plan in stages for fault in plan) + "\n")
    lines, steps = [], 0

    for number, (workers, plan) in enumerate(stages):
        folder = tmp_path / f"line-{number}"
        with line_of(folder, kind, workers, resumes=number > 0) as line:
            strike_unevenly(line, plan)
            line.await_progress()
            steps = max(steps, line.finish())
        lines.append(line)
    expected = alone(tmp_path / "alone", kind, steps)

    for line in lines:
        judge(line, expected)
