"""Spares: how long they may follow, what people see of them, and what the line expects."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.capabilities import LEARNING
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import LineSettings
from scenarios.line_bench import Bench

SETTINGS = LineSettings(run_id="7f3a", expect_workers=1, max_workers=4)
PLAN = RunPlan(global_batch=1, dataset_size=100_000)
SPARE = 3


class Line:
    """A worker that trains, and a spare."""

    def __init__(self) -> None:
        self.bench = Bench(SETTINGS, PLAN)
        can = frozenset({LEARNING})
        spare = replace(self.bench.request(SPARE, 9), capabilities=can, spare=True)
        self.spare, _ = self.bench.join("spare", spare)
        self.worker, _ = self.bench.join("w0", self.bench.request(0, 1))
        self.saved()

    @property
    def core(self):  # type: ignore[no-untyped-def]  # the core's state is nobody's API
        return self.bench.line._core

    @property
    def detail(self) -> str:
        status = self.bench.line.status(self.bench.now)
        return next(each.detail for each in status.workers if each.worker == SPARE)

    def saved(self) -> list[do.Effect]:
        return self.bench.send(on.RecordSaved(self.bench.journal.save_record()))

    def ready(self, stream: int, *, weight: float) -> None:
        report = self.bench.ready(stream, loss=1.0, weight=weight)
        report = replace(report, samples=int(weight), next=on.StandingRequest())
        self.bench.peers[stream].held = report.key
        self.bench.send(on.WorkerReady(stream, report))

    def ask(self) -> list[do.Effect]:
        return self.bench.send(on.WorkRequested(self.worker, self.core.chain.head))

    def step(self, *, spare_follows: bool) -> list[do.Effect]:
        """One step; the spare holds its averages in time, or says nothing."""
        effects = [] if self.core.round else self.ask()
        if spare_follows:
            self.ready(self.spare, weight=0.0)
        self.ready(self.worker, weight=1.0)
        return [*effects, *self.saved()]

    def catch_up(self) -> None:
        self.step(spare_follows=False)
        self.bench.send(on.ListeningReported(self.spare))
        self.step(spare_follows=False)
        self.ask()
        transfer = self.bench.peers[self.spare].transfer
        assert transfer is not None
        self.bench.send(on.StateReported(self.spare, transfer.transfer_id, transfer.head, ""))


def test_people_see_that_a_spare_is_one_and_how_far_it_is() -> None:
    line = Line()
    seen = [line.detail]
    line.step(spare_follows=False)
    seen.append(line.detail)
    line.bench.send(on.ListeningReported(line.spare))
    line.step(spare_follows=False)
    line.ask()
    transfer = line.bench.peers[line.spare].transfer
    assert transfer is not None
    line.bench.send(on.StateReported(line.spare, transfer.transfer_id, transfer.head, ""))
    seen.append(line.detail)
    for _ in range(3):
        line.step(spare_follows=False)
    seen.append(line.detail)

    assert seen == [
        "spare: waits until the line trains",
        "spare: gets the line's state",
        "spare: ready",
        "spare: 3 steps behind",
    ]


def test_a_spare_that_keeps_up_goes_on_learning_for_ever() -> None:
    line = Line()
    line.catch_up()

    effects = [effect for _ in range(600) for effect in line.step(spare_follows=True)]

    assert not [each for each in effects if isinstance(each, do.CloseStream | do.SendTransfer)]
    assert line.detail == "spare: ready"
    assert line.core.last_roster == (0,)


def test_a_spare_that_the_line_leaves_behind_begins_again() -> None:
    line = Line()
    line.catch_up()

    effects = [effect for _ in range(300) for effect in line.step(spare_follows=False)]

    closed = [each for each in effects if isinstance(each, do.CloseStream)]
    assert [each.stream for each in closed] == [line.spare]
    assert "came no nearer" in closed[0].message


def test_a_dropped_spare_leaves_the_number_of_workers_as_it_was() -> None:
    line = Line()

    line.core.dropped.add(SPARE)

    assert line.core.expected == 1
