"""A run in the background: its metrics, its end, and what `join` returns or raises."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_trainer import Callback, Evaluation, Fit, Line, LineHalted, Trainer, TrainingRun
from andon_trainer.termination import Terminated

SAMPLES = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))


def trainer(*callbacks: Callback, **changes: Any) -> Trainer:
    usual: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(5, 1),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "data": lambda: (TensorDataset(SAMPLES, SAMPLES.sum(1, keepdim=True)),) * 2,
    }
    return Trainer(**{**usual, **changes}, callbacks=callbacks)


class Gate(Callback):
    """Holds a run after one of its steps, until it is opened."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.reached, self.open = threading.Event(), threading.Event()

    def on_start(self, line: Line, model: torch.nn.Module) -> None:
        self.line = line

    def on_step(self, step: Any) -> None:
        self.line.log({"twice": 2.0 * step.number})
        if step.number == self._step:
            self.reached.set()
            self.open.wait(20)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opens at the end, so that a run that is held in a test is over with it."""
    gate = Gate(3)
    yield gate
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name == "andon-run":
            thread.join(20)


def held(gate: Gate, **settings: Any) -> TrainingRun:
    run = trainer(gate).start(Fit(batch_size=8, seed=1, **settings))
    assert gate.reached.wait(20)
    return run


class Course(Callback):
    """Notes the weights that a run begins with, and the loss of each step."""

    def on_start(self, line: Line, model: torch.nn.Module) -> None:
        self.seen: list[Any] = [tensor.tolist() for tensor in model.state_dict().values()]

    def on_step(self, step: Any) -> None:
        self.seen.append((step.number, step.loss))


def test_a_run_in_the_background_computes_what_fit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # A line of an earlier test may end meanwhile, and take its own hooks away.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", partial(sys.exit))
    fit = Fit(batch_size=8, epochs=2, evaluate_every="epoch", seed=1)
    hooks, beside, alone = (sys.excepthook, sys.exit), Course(), Course()

    report = trainer(beside).start(fit).join()

    assert (sys.excepthook, sys.exit) == hooks
    again = trainer(alone).fit(fit)
    # What differs says why: the first weights if somebody drew from torch's generator meanwhile.
    assert beside.seen == alone.seen
    assert report.digest == again.digest
    assert (report.steps, report.stopped) == (6, "epochs")


def test_metrics_are_of_one_step_and_wait_for_none(gate: Gate) -> None:
    run = held(gate, steps=6, evaluate_every=2)

    seen = run.metrics()

    # The third step is being noted: what is seen is of the second, all of it.
    assert (seen.state, seen.step, seen.epoch, seen.workers) == ("running", 2, 0, 1)
    assert seen.logged["twice"] == 4.0
    assert isinstance(seen.evaluation, Evaluation)
    assert seen.evaluation.step == 2
    gate.open.set()
    run.join()
    assert (run.metrics().state, run.metrics().step, run.metrics().epoch) == ("complete", 6, 2)


def test_a_stop_ends_the_run_for_its_first_reason(gate: Gate) -> None:
    run = held(gate, steps=100)

    run.stop("good enough")
    run.stop("another reason")
    gate.open.set()

    assert run.join().stopped == "good enough"
    assert run.metrics().state == "stopped"
    assert run.metrics().step <= 4
    run.stop("over already")
    assert run.join().stopped == "good enough"


def test_a_stop_before_the_worker_has_joined_ends_the_run_with_its_first_step() -> None:
    joins = threading.Event()

    def model() -> torch.nn.Module:
        joins.wait(20)
        return torch.nn.Linear(5, 1)

    run = trainer(model=model).start(Fit(batch_size=8, steps=100))
    assert run.metrics().state == "starting"
    run.stop("changed my mind")
    joins.set()

    assert run.join().steps == 1


def test_join_raises_what_the_training_raised_with_its_own_traceback_each_time() -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise KeyError("labels")

    run = trainer(loss=loss).start(Fit(batch_size=8, steps=2))

    for _ in range(2):
        with pytest.raises(KeyError, match="labels") as raised:
            run.join()
        frames = [each.name for each in traceback.extract_tb(raised.tb)]
        assert frames.count("loss") == 1
        assert frames.count("join") == 1
    assert run.metrics().state == "failed"
    assert run.metrics().error is raised.value


def test_join_does_not_wait_beyond_its_time(gate: Gate) -> None:
    run = held(gate, steps=4)

    with pytest.raises(TimeoutError, match="at step 2"):
        run.join(0.01)


def test_a_halt_is_the_state_of_a_run_and_what_join_raises() -> None:
    run = trainer(loss=lambda model, batch: model(batch[0]).sum() * float("nan")).start(
        Fit(batch_size=8, steps=2)
    )

    with pytest.raises(LineHalted):
        run.join()

    assert run.metrics().state == "halted"
    assert isinstance(run.metrics().error, LineHalted)


def test_a_line_that_waits_for_its_operator_is_seen_as_halted(gate: Gate) -> None:
    run = held(gate, steps=4)
    member: Any = gate.line._session.member
    evidence = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=4, message="looks odd")

    member.position = replace(member.position, halt=evidence)

    seen = run.metrics()
    assert (seen.state, seen.step) == ("halted", 2)
    assert isinstance(seen.error, LineHalted)
    gate.open.set()
    run.join()


def test_one_run_trains_at_a_time_and_the_next_one_after_it(gate: Gate) -> None:
    run = held(gate, steps=4)

    with pytest.raises(RuntimeError, match="a run trains in this process already, at step 2"):
        trainer().start(Fit(batch_size=8, steps=1))
    with pytest.raises(RuntimeError, match="in the background"):
        Line()
    gate.open.set()
    run.join()

    assert trainer().start(Fit(batch_size=8, steps=1)).join().steps == 1


def test_a_program_that_ends_takes_its_worker_away_after_the_step(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    program_over = threading.Event()
    program = threading.Thread(target=program_over.wait)
    program.start()
    run = TrainingRun(
        lambda watch: trainer(gate, watch).fit(Fit(batch_size=8, steps=10**9, progress=False)),
        program,
    )
    assert gate.reached.wait(20)

    program_over.set()
    gate.open.set()

    with pytest.raises(Terminated):
        run.join(20)
    assert (run.metrics().state, run.metrics().step >= 3) == ("stopped", True)
    assert "Call run.join() to train to the end" in caplog.text
