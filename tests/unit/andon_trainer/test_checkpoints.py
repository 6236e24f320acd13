"""Checkpoints of a run: when they are written and removed, and going on from one, alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
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

from andon.host.manifest import (
    MANIFEST,
    CheckpointFacts,
    Manifest,
    checkpoint_folder,
    checkpoints_in,
    step_of,
)
from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.run_settings import RunPlan
from andon_trainer import CheckpointRefused, Line, LineHalted
from andon_trainer.config import LineConfig
from andon_trainer.core.reports import WrittenCheckpoint
from andon_trainer.place.solo import SoloMember
from andon_trainer.place.talk import Silence
from andon_trainer.state.checkpoints import WorkerCheckpoints
from andon_trainer.state.file_work import FileWork
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

    def written(self) -> None:
        """Waits for what is being written."""
        self.line._session.worker.checkpoints._work.wait()

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
    torch.manual_seed(77)  # As no worker of the run before.
    own = torch.get_rng_state()
    config = LineConfig(resume=tmp_path / "checkpoints/step-00000004", launch_slot=given)
    checkpoints = WorkerCheckpoints(config, torch.device("cpu"))
    checkpoints.begin(run.line._session.worker.replica)

    checkpoints.restore_generators(worker)

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
    checkpoints.end(member)

    assert steps_in(tmp_path) == [4, 2]
    assert checkpoints.last == tmp_path / "checkpoints/step-00000002"


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
        run.written()
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


class HeldWork(FileWork):
    """Begins to work when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def begin(self, work: Callable[[], None]) -> None:
        def held() -> None:
            self.go.wait()
            work()

        self.go.clear()
        super().begin(held)

    def wait(self) -> None:
        self.go.set()  # Who waits for it is not kept waiting.
        super().wait()


class Talk(Silence):
    """Keeps what is told of checkpoints, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def show(self, activity: str, detail: str = "") -> None:
        self.told += [detail] if detail else []

    def writes(self, step: int) -> None:
        self.told.append(f"writes {step}")

    def wrote(self, checkpoint: WrittenCheckpoint) -> None:
        self.told.append(f"wrote {checkpoint.step}")


class Writer:
    """A writer, step by step, whose thread works when a test says so."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        self.run_dir = run_dir
        self.model = nn.Linear(600, 600)  # Large enough to be copied beside training.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.replica = Replica([self.model], [self.optimizer])
        self.plan = RunPlan(global_batch=4, dataset_size=8)
        self.work = HeldWork()
        config = LineConfig(run_dir=run_dir, **settings)
        self.checkpoints = WorkerCheckpoints(config, torch.device("cpu"), self.work)
        self.halts: list[str] = []
        self.answers = True
        self.talk = Talk()

    def member(self, step: int, **assigned: Any) -> SoloMember:
        member = SoloMember(self.plan)
        work = member.next_round()
        member.position = replace(
            member.position, step=step, head=work.key, assigned=replace(work, **assigned)
        )
        member.talk = self.talk

        def stop_line(kind: str, message: str) -> bool:
            self.halts.append(f"{kind} at {step}: {message}")
            return self.answers

        member.stop_line = stop_line  # type: ignore[method-assign]  # answered at once, or never
        return member

    def step(self, step: int, *, over: bool = False, **assigned: Any) -> bytes:
        """Commits a step, and comes to the point between two; returns the weights there."""
        self.model.zero_grad()
        self.model(torch.ones(1, 600)).sum().backward()
        # Whatever waits for a copy would never end here.
        assert self.checkpoints._writing is None or self.work.go.is_set()
        self.optimizer.step()
        digest = self.replica.digest()
        self.between(step, over=over, **assigned)
        return digest

    def between(self, step: int, *, over: bool = False, **assigned: Any) -> None:
        member = self.member(step, **assigned)
        self.checkpoints.between_steps(self.replica, member, self.plan, over=over)

    def keep(self, step: int, key: Key | None = None, *, paused: bool = True) -> None:
        """The line has sent it away, as the last one that holds `step`; `key`: of its round."""
        member = self.member(step)
        if key is not None:
            assert member.position.assigned is not None
            assigned = replace(member.position.assigned, key=key)
            member.position = replace(member.position, assigned=assigned)
        self.checkpoints.keep(self.replica, member, self.plan, paused=paused)

    def end(self) -> None:
        self.checkpoints.end(self.member(0))

    @property
    def steps(self) -> list[int]:
        return steps_in(self.run_dir)


def test_a_checkpoint_counts_once_it_is_whole_and_not_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)

    digest = writer.step(2)
    begun = (writer.steps, writer.checkpoints.last, list(writer.talk.told))
    writer.work.wait()
    writer.step(3)

    assert begun == ([], None, ["writes 2"])
    assert writer.steps == [2]
    assert writer.talk.told == ["writes 2", "writes 0", "wrote 2"]
    folder = tmp_path / "checkpoints/step-00000002"
    assert writer.checkpoints.last == folder
    assert Manifest.read(folder).facts.digest == digest.hex()


def test_a_checkpoint_that_newer_ones_pushed_out_while_a_worker_started_gives_way_to_them(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    for step in (2, 4):
        digest = writer.step(step)
        writer.work.wait()
    old, new = (tmp_path / f"checkpoints/step-{step:08d}" for step in (2, 4))
    on_a_line = LineConfig(run_dir=tmp_path, resume=old, address="127.0.0.1:1")
    slow = WorkerCheckpoints(on_a_line, torch.device("cpu"))
    alone = WorkerCheckpoints(replace(on_a_line, address=""), torch.device("cpu"))
    never = replace(on_a_line, resume=tmp_path / "checkpoints/step-00000001")
    mistaken = WorkerCheckpoints(never, torch.device("cpu"))
    begun = WorkerCheckpoints(replace(never, andon_run=True), torch.device("cpu"))
    shutil.rmtree(old)

    for checkpoints in (alone, mistaken):
        with pytest.raises(CheckpointRefused, match="there is no checkpoint in"):
            checkpoints.begin(writer.replica)
        checkpoints.close()
    for checkpoints in (slow, begun):
        checkpoints.begin(writer.replica)
        assert checkpoints.origin is not None
        assert checkpoints.origin.step == 4
        checkpoints.close()
    shutil.rmtree(new)
    with pytest.raises(CheckpointRefused, match="there is no checkpoint in"):
        slow.begin(writer.replica)
    slow.close()

    assert writer.replica.digest() == digest


def test_a_worker_that_goes_back_loads_a_checkpoint_of_that_record_and_removes_later_ones(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    digest = writer.step(2)
    writer.work.wait()
    writer.step(3)
    folder = tmp_path / "checkpoints/step-00000002"
    head = Manifest.read(folder).facts.head
    now = writer.step(4)

    with pytest.raises(CheckpointRefused, match=r"of record .* is wanted"):
        writer.checkpoints.restore(writer.replica, folder, Key(head.term, head.round + 1))
    refused = (writer.replica.digest(), writer.steps)
    writer.checkpoints.restore(writer.replica, folder, head)
    restored = writer.replica.digest()
    writer.step(3)

    assert refused == (now, [4, 2])
    assert restored == digest
    assert writer.steps == [2], "what was being written is of a step that is no more"
    assert "wrote 4" not in writer.talk.told


def test_training_waits_where_one_is_due_before_the_last_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2, keep_checkpoints=1)

    for step in (2, 4, 6):
        writer.between(step)
    writer.end()

    assert writer.steps == [6, 4], "older ones went, and the newest is not proven"
    told = [each for each in writer.talk.told if each.startswith("w")]
    assert told == [
        *("writes 2", "writing a checkpoint", "writes 0", "wrote 2"),
        *("writes 4", "writing a checkpoint", "writes 0", "wrote 4"),
        *("writes 6", "wrote 6"),
    ]
    assert caplog.text.count("is still being written: training waits for it") == 1


def test_a_signal_is_answered_once_the_checkpoint_before_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path, checkpoint_every=10)
    writer.between(10)

    writer.checkpoints._request(signal.SIGUSR1, None)
    writer.between(11)
    meanwhile = list(writer.talk.told)
    writer.work.wait()
    for step in (12, 13):
        writer.between(step)
    writer.end()

    assert meanwhile == ["writes 10"], "training does not wait for it"
    assert writer.steps == [12, 10]


def test_what_fails_beside_training_halts_the_line_and_is_written_after_the_answer(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.between(2)
    for draft in (tmp_path / "checkpoints").glob(".*"):
        shutil.rmtree(draft)

    writer.work.wait()
    writer.step(3)

    folder = tmp_path / "checkpoints/step-00000002"
    assert writer.halts == [f"CHECKPOINT at 3: No such file or directory ({folder})"]
    assert writer.steps == [3]
    assert writer.talk.told == ["writes 2", "writes 0", "writing a checkpoint", "wrote 3"]
    writer.between(4)
    writer.end()
    assert writer.steps == [4, 3]


def test_what_cannot_be_written_is_given_up_once_nobody_can_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.answers = False
    (tmp_path / "checkpoints").touch()

    writer.between(2, over=True)

    assert len(writer.halts) == 1
    assert "step-00000002 could not be written: " in caplog.text
    assert "and the run is over" in caplog.text


def test_weights_that_a_script_writes_beside_the_copy_are_in_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.between(2)

    writer.model.weight.data.mul_(2)
    writer.work.wait()
    digest = writer.step(3)
    writer.model.weight.data.mul_(2)  # From now on all is copied at once.
    writer.work.wait()
    again = writer.step(4)
    writer.model.weight.data.mul_(2)
    writer.end()

    assert writer.steps == [4, 3]
    assert "checkpoint of step 2 was copied: it is taken again" in caplog.text
    for step, wanted in ((3, digest), (4, again)):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        loaded = Replica([model := nn.Linear(600, 600)], [torch.optim.SGD(model.parameters())])
        loaded.load(folder)  # It compares the digest.
        assert loaded.digest() == wanted


@pytest.mark.parametrize("ends", ["over", "a worker that leaves"])
def test_the_end_waits_for_what_is_being_written(tmp_path: Path, ends: str) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.between(2)

    if ends == "over":
        writer.between(3, over=True)
        assert writer.steps == [3, 2]
    writer.end()

    assert writer.steps[-1] == 2
    assert "wrote 2" in writer.talk.told
    assert writer.halts == []


def test_no_checkpoint_is_cut_of_what_was_computed_ahead(tmp_path: Path) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)

    writer.between(2, ahead_batch=PositionRange(4, 8))
    writer.between(3)
    writer.end()

    assert writer.steps == [3]


def test_the_best_is_named_once_it_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.between(2)

    writer.checkpoints.keep_best(2)
    before = (tmp_path / "checkpoints/best").exists()
    writer.work.wait()
    writer.between(3)
    named = (tmp_path / "checkpoints/best").resolve().name
    writer.checkpoints.keep_best(3)
    writer.between(3)
    writer.end()

    assert not before
    assert named == "step-00000002"
    assert (tmp_path / "checkpoints/best").resolve().name == "step-00000003"


def test_the_last_holder_of_a_state_keeps_it_wherever_its_loop_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand, paused = Writer(tmp_path / "by hand"), Writer(tmp_path / "paused")

    by_hand.keep(3, paused=False)  # It may not have made its optimizer's step yet.
    refused = by_hand.steps, caplog.text
    by_hand.between(3)
    by_hand.keep(3, paused=False)
    paused.keep(3, Key(1, 99))

    assert refused[0] == []
    assert "step 3 is in no checkpoint, and nobody else holds it" in refused[1]
    assert (by_hand.steps, paused.steps) == ([3], [3])


def test_a_checkpoint_that_failed_keeps_nobody_from_writing_the_last_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path, checkpoint_every=2)
    writer.step(2)
    shutil.rmtree(tmp_path / "checkpoints")  # Below what is being written.

    writer.keep(3)

    assert "step-00000002 could not be written" in caplog.text
    assert (writer.halts, writer.steps) == ([], [3])
    assert writer.talk.told[-1] == "wrote 3"


class Beside:
    """A script with a large model, that keeps what each of its checkpoints is to hold."""

    STEPS = 5

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.line = Line(
            device="cpu",
            total_steps=self.STEPS,
            run_dir=folder / "run",
            checkpoint_every=1,
            keep_checkpoints=9,
        )
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(5, 600), nn.BatchNorm1d(600), nn.Linear(600, 600))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        x = torch.randn(20, 5)
        self.loader: Any = DataLoader(TensorDataset(x), 4, shuffle=True)

    def keep(self) -> None:
        """Writes what was committed last, at rest."""
        replica, digest = self.line._session.worker.replica, weights_digest([self.model]).hex()
        facts = CheckpointFacts(
            head=Key(1, 1),
            step=self.line.step,
            cursor=Cursor(0, 0),
            digest=digest,
            plan=RunPlan(global_batch=4),
        )
        replica.save(checkpoint_folder(self.folder / "rest", self.line.step), facts)

    def each_step(self) -> None:
        self.prepare()
        for _epoch in self.line.epochs(9):
            for (x,) in self.loader:
                self.body(x)

    def accumulated(self) -> None:
        self.prepare()
        for _epoch in self.line.epochs(9):
            for (x,) in self.loader:
                with self.line.accumulate(3):
                    self.body(x)

    def by_hand(self) -> None:
        self.line.register("optimizer", self.optimizer)
        self.line.join(self.model)
        while not self.line.complete:
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 5)).square().mean().backward()
            self.keep()
            self.line.all_reduce_gradients(self.model)
            if self.line.should_commit():
                self.optimizer.step()
        self.keep()

    def prepare(self) -> None:
        prepared = self.line.prepare(self.model, self.optimizer, self.loader)
        self.model, self.optimizer, self.loader = prepared

    def body(self, x: torch.Tensor) -> None:
        self.keep()
        self.optimizer.zero_grad()
        self.line.backward(self.model(x).square().mean())
        self.optimizer.step()


@pytest.mark.parametrize("schedule", ["each_step", "accumulated", "by_hand"])
def test_checkpoints_written_beside_steps_hold_what_lay_between_them(
    tmp_path: Path, schedule: str
) -> None:
    script = Beside(tmp_path)

    getattr(script, schedule)()
    script.line.close()

    steps = steps_in(tmp_path / "run")
    assert steps == list(range(script.STEPS, 0, -1))
    kept = [step for step in steps_in(tmp_path / "rest") if step]
    assert len(kept) >= script.STEPS - 1
    for step in kept:
        written, rest = (checkpoint_folder(tmp_path / name, step) for name in ("run", "rest"))
        for tree in ("model", "optimizers", "registered"):
            for kind in ("safetensors", "json"):
                name = f"{tree}.{kind}"
                assert (written / name).read_bytes() == (rest / name).read_bytes(), (step, name)
        assert Manifest.read(written).facts.digest == Manifest.read(rest).facts.digest
