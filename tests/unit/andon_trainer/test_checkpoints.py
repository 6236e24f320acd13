"""Checkpoints of a run: when they are written and removed, and going on from one, alone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.host.manifest import MANIFEST, Manifest, checkpoints_in, step_of
from andon.protocol.run_settings import RunPlan
from andon_trainer import CheckpointRefused, Line, LineHalted
from andon_trainer.config import LineConfig
from andon_trainer.place.solo import SoloMember
from andon_trainer.state.checkpoints import WorkerCheckpoints
from andon_trainer.state.replica import Replica
from andon_trainer.state.weights import weights_digest

SAMPLES, BATCH = 22, 8


class Run:
    """One script, as a process would run it: alone, with dropout, a scheduler and AdamW."""

    def __init__(
        self,
        steps: int | None,
        *,
        batch: int = BATCH,
        seed: int = 3,
        other: float = 0.0,
        **settings: Any,
    ) -> None:
        self.line = Line(device="cpu", seed=seed, total_steps=steps, **settings)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
        x += other
        loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True)
        self.loader = self.line.prepare(self.model, self.optimizer, self.scheduler, loader)[-1]
        self.drawn: list[tuple[float, float]] = []
        self.epochs: list[int] = []

    def train(self, each: Callable[[Run], None] = lambda run: None, *, epochs: int = 10**6) -> Run:
        for epoch in self.line.epochs(epochs):
            self.epochs.append(epoch)
            for x, y in self.loader:
                each(self)
                self.optimizer.zero_grad()
                self.line.backward(F.mse_loss(self.model(x), y))
                self.optimizer.step()
                self.scheduler.step()
                self.drawn.append((random.random(), np.random.random()))
        self.line.close()
        return self

    @property
    def digest(self) -> bytes:
        return weights_digest([self.model])


def steps_in(run_dir: Path) -> list[int]:
    return [step_of(folder) for folder in checkpoints_in(run_dir)]


@pytest.mark.parametrize(("steps", "epochs"), [(9, 10**6), (None, 1)], ids=["steps", "epochs"])
def test_the_last_step_of_a_run_has_a_checkpoint(
    tmp_path: Path, steps: int | None, epochs: int
) -> None:
    run = Run(steps, run_dir=tmp_path, checkpoint_every=4, keep_checkpoints=9).train(epochs=epochs)

    last = run.line.step
    assert last % 4
    assert steps_in(tmp_path)[0] == last


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = Run(9, run_dir=tmp_path, checkpoint_every=4, keep_checkpoints=9).train()

    resumed = Run(9, resume=tmp_path / "checkpoints/step-00000004").train()

    assert resumed.line.step == 9
    assert resumed.digest == whole.digest
    assert resumed.drawn == whole.drawn[4:]
    assert resumed.epochs == [1, 2]


def test_a_resumed_run_hands_on_what_the_line_knew_of_its_workers_speed(tmp_path: Path) -> None:
    Run(4, run_dir=tmp_path, checkpoint_every=4).train()
    folder = tmp_path / "checkpoints/step-00000004"
    manifest = Manifest.read(folder)
    known = replace(manifest.facts, pacing=b"known")
    (folder / MANIFEST).write_bytes(Manifest(known, manifest.files).to_bytes())

    Run(9, resume=folder, run_dir=tmp_path / "again", checkpoint_every=9).train()

    written = Manifest.read(tmp_path / "again" / "checkpoints/step-00000009")
    assert written.facts.pacing == b"known"


def test_prepare_returns_with_the_checkpoints_state_and_step(tmp_path: Path) -> None:
    Run(4, run_dir=tmp_path, checkpoint_every=4).train()
    folder = tmp_path / "checkpoints/step-00000004"
    saved = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 1))
    Replica([saved], [torch.optim.AdamW(saved.parameters())]).load(folder)

    resumed = Run(9, resume=folder)

    assert (resumed.line.step, resumed.line.epoch) == (4, 1)
    assert resumed.digest == weights_digest([saved])
    assert resumed.scheduler.last_epoch == 4
    resumed.line.close()


@pytest.mark.parametrize(
    ("worker", "given", "takes_over"),
    [(0, None, True), (1, None, False), (0, 1, False), (1, 0, True)],
)
def test_only_slot_0_continues_the_writers_random_numbers_whoever_chose_the_slot(
    tmp_path: Path, worker: int, given: int | None, takes_over: bool
) -> None:
    run = Run(4, run_dir=tmp_path, checkpoint_every=4).train()
    replica, plan = run.line._session.worker.replica, RunPlan(global_batch=4, dataset_size=8)
    torch.manual_seed(77)  # As no worker of the run before.
    own = torch.get_rng_state()
    config = LineConfig(resume=tmp_path / "checkpoints/step-00000004", launch_slot=given)
    checkpoints = WorkerCheckpoints(config, torch.device("cpu"))
    checkpoints.begin(replica)

    member = SoloMember(plan)
    member.position = replace(member.position, worker=worker)

    checkpoints.between_steps(replica, member, plan)

    assert torch.equal(torch.get_rng_state(), own) is not takes_over


def test_a_writer_whose_line_went_back_writes_the_steps_from_there_on_again(tmp_path: Path) -> None:
    replica = Run(1).train().line._session.worker.replica
    plan = RunPlan(global_batch=4, dataset_size=8)
    checkpoints = WorkerCheckpoints(
        LineConfig(run_dir=tmp_path, checkpoint_every=2), torch.device("cpu")
    )
    for step in (4, 2):  # It survived at step 4, and got the state of step 1 then.
        member = SoloMember(plan)
        head = member.next_round().key
        member.position = replace(member.position, step=step, head=head)
        checkpoints.between_steps(replica, member, plan)

    assert steps_in(tmp_path) == [4, 2]


def test_a_resumed_run_that_is_done_takes_no_step(tmp_path: Path) -> None:
    done = Run(4, run_dir=tmp_path, checkpoint_every=4).train()

    resumed = Run(4, resume=tmp_path / "checkpoints/step-00000004").train()

    assert resumed.drawn == []
    assert resumed.digest == done.digest


def test_a_script_with_other_samples_is_refused_unless_that_is_meant(tmp_path: Path) -> None:
    Run(4, run_dir=tmp_path, checkpoint_every=4).train()
    folder = tmp_path / "checkpoints/step-00000004"

    with pytest.raises(CheckpointRefused, match=r"a run with other samples.*ANDON_CHECK_DATA=0"):
        Run(8, run_dir=tmp_path, resume=folder, other=1.0)
    meant = Run(8, run_dir=tmp_path, resume=folder, other=1.0, check_data=False).train()

    assert meant.line.step == 8


@pytest.mark.parametrize(
    ("change", "what"),
    [({"batch": 4}, "global_batch is 8"), ({"seed": 5}, "seed is 3")],
)
def test_a_script_that_means_another_run_is_refused(
    tmp_path: Path, change: dict[str, int], what: str
) -> None:
    Run(4, run_dir=tmp_path, checkpoint_every=4).train()

    with pytest.raises(CheckpointRefused, match=f"of a run whose {what}"):
        Run(9, resume=tmp_path / "checkpoints/step-00000004", **change)


def test_older_checkpoints_go_once_a_step_was_committed_on_top_of_the_newest(
    tmp_path: Path,
) -> None:
    seen = {}

    def look(run: Run) -> None:
        seen[run.line.step] = steps_in(tmp_path)

    Run(5, run_dir=tmp_path, checkpoint_every=1, keep_checkpoints=2).train(look)

    assert seen == {0: [], 1: [1], 2: [2, 1], 3: [3, 2, 1], 4: [4, 3, 2]}
    assert steps_in(tmp_path) == [5, 4, 3]


def test_checkpoints_of_a_history_that_was_rolled_back_neither_count_nor_go(
    tmp_path: Path,
) -> None:
    Run(8, run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=9).train()

    Run(
        5,
        resume=tmp_path / "checkpoints/step-00000002",
        run_dir=tmp_path,
        checkpoint_every=1,
        keep_checkpoints=1,
    ).train()

    assert steps_in(tmp_path) == [8, 6, 5, 4]


def test_sigusr1_writes_a_checkpoint_after_the_present_step(tmp_path: Path) -> None:
    def ask(run: Run) -> None:
        if run.line.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    Run(6, run_dir=tmp_path).train(ask)

    assert steps_in(tmp_path) == [3]


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def ask(run: Run) -> None:
        if run.line.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    Run(6, run_dir=tmp_path).train(ask)

    assert seen == [signal.SIGUSR1]
    assert steps_in(tmp_path) == []


def test_a_checkpoint_that_cant_be_written_stops_a_worker_that_is_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("no folder")
    run = Run(6, run_dir=tmp_path, checkpoint_every=2)

    with pytest.raises(LineHalted, match=r"halted at step 3: .*checkpoint") as halt:
        run.train()
    (tmp_path / "checkpoints").unlink()
    run.train()

    assert halt.value.reason == "checkpoint"
    assert run.line.step == 6
    assert steps_in(tmp_path) == [6, 4, 2]
