"""Whom the line asks whether it is there, and whom it never suspects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.capabilities import LEARNING, PROBE
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import LineSettings
from scenarios.line_bench import Bench

ABLE = frozenset({LEARNING, PROBE})
TICK_S = 0.05


class Trained:
    """A line that has made some steps, and knows how fast its workers answer."""

    def __init__(self, workers: int, *able: frozenset[str], min_workers: int = 1) -> None:
        settings = LineSettings(run_id="7f3a", expect_workers=workers, min_workers=min_workers)
        self.bench = Bench(settings, RunPlan(global_batch=6, dataset_size=6400))
        self.streams = [
            self._join(worker, able[worker] if able else ABLE) for worker in range(workers)
        ]
        self._saved()
        first, *rest = self.streams
        for stream in rest:
            self._ask(first)
            transfer = self.bench.peers[stream].transfer
            assert transfer is not None
            self.bench.peers[stream].head = transfer.head
            report = on.StateReported(stream, transfer.transfer_id, transfer.head)
            self.bench.send(report)
        self._ask_all()
        self.step()
        for _ in range(12):
            self.pass_time(1.0)
            self.beat()
        for _ in range(33):  # The first one was long.
            self.step()

    def step(self) -> None:
        for stream in self.streams:
            self.bench.send(on.WorkerReady(stream, self.bench.ready(stream)))
        self._saved()
        self._ask_all()

    def beat(self) -> list[int]:
        """A heartbeat of each worker, whose probes are answered. Returns who was asked."""
        done = [each for s in self.streams for each in self.bench.send(on.HeartbeatArrived(s, 1))]
        return self.answer(done)

    def answer(self, done: list[do.Effect], silent: frozenset[int] = frozenset()) -> list[int]:
        """Answers the probes in `done`, but for those of silent streams. Returns who was asked."""
        asked = [each for each in done if isinstance(each, do.SendProbe)]
        for probe in asked:
            if probe.stream not in silent:
                self.bench.send(on.ProbeAnswered(probe.stream, probe.number))
        return [self.streams.index(each.stream) for each in asked]

    def pass_time(self, seconds: float, *silent: int) -> tuple[set[int], set[int]]:
        """Time passes, and workers answer, but for silent ones. Returns the asked and the lost."""
        asked: set[int] = set()
        lost: set[int] = set()
        quiet = frozenset(self.streams[each] for each in silent)
        for _ in range(round(seconds / TICK_S)):
            self.bench.now += TICK_S
            done = self.bench.send(on.TimePassed())
            lost |= {each.worker for each in done if isinstance(each, do.SaveDeparture)}
            asked |= set(self.answer(done, quiet))
        return asked, lost

    def _join(self, worker: int, able: frozenset[str]) -> int:
        request = replace(self.bench.request(worker, worker), capabilities=able)
        return self.bench.join(f"w{worker}", request)[0]

    def _saved(self) -> None:
        self.bench.send(on.RecordSaved(self.bench.journal.save_record()))

    def _ask(self, stream: int) -> None:
        self.bench.send(on.WorkRequested(stream, self.bench.peers[stream].head))

    def _ask_all(self) -> None:
        for stream in self.streams:
            self._ask(stream)


def test_in_a_round_that_is_in_time_nobody_is_asked() -> None:
    line = Trained(3)

    for _ in range(20):
        line.step()
        assert line.beat() == []


def test_the_members_of_a_late_round_are_asked_ever_more_rarely() -> None:
    line = Trained(3)
    times = [line.bench.now for _ in range(200) if line.pass_time(TICK_S)[0]]

    assert 8 <= len(times) <= 15
    assert times[-1] - times[-2] > 1.0


def test_one_that_is_silent_is_suspected_long_before_its_lease() -> None:
    line = Trained(3)

    asked, lost = line.pass_time(0.4, 1)

    assert asked == {0, 1, 2}
    assert lost == {1}


def test_if_two_are_silent_the_lease_decides() -> None:
    assert Trained(4).pass_time(2.5, 1, 2)[1] == set()


def test_one_of_two_is_not_even_asked() -> None:
    assert Trained(2).pass_time(2.5, 1) == (set(), set())


def test_a_worker_without_which_too_few_are_left_is_not_asked() -> None:
    assert Trained(3, min_workers=3).pass_time(2.5, 1) == (set(), set())


@pytest.mark.parametrize("lacks", [LEARNING, PROBE])
def test_a_worker_of_an_older_version_has_its_lease(lacks: str) -> None:
    line = Trained(3, ABLE, ABLE - {lacks}, ABLE)

    asked, lost = line.pass_time(2.5, 1)

    assert asked == {0, 2} | ({1} if lacks == LEARNING else set())
    assert lost == set()


def test_a_worker_that_has_done_its_part_has_its_lease() -> None:
    line = Trained(3)
    line.bench.send(on.WorkerReady(line.streams[1], line.bench.ready(line.streams[1])))

    assert line.pass_time(2.5, 1)[1] == set()


def test_others_that_answer_slowly_themselves_buy_it_more_time() -> None:
    line = Trained(3)
    line.bench.now += 0.1
    probes = line.bench.send(on.TimePassed())
    line.bench.now += 0.4
    line.answer(probes, frozenset({line.streams[1]}))

    assert line.pass_time(0.3, 1)[1] == set()
    assert line.pass_time(0.5, 1)[1] == {1}


def test_a_line_whose_own_ticks_come_late_is_more_patient_until_they_are_in_time_again() -> None:
    crowded, once, since = Trained(3), Trained(3), Trained(3)

    for line, ticks in ((crowded, 2), (once, 1), (since, 2)):
        for _ in range(ticks):
            line.bench.send(on.TimePassed(late_s=0.1))
    for _ in range(400):
        since.bench.send(on.TimePassed())

    # Its answers are as fast as ever, but each of their ways may take as long as the tick's did.
    assert crowded.pass_time(0.4, 1)[1] == set()
    assert crowded.pass_time(0.4, 1)[1] == {1}
    assert once.pass_time(0.4, 1)[1] == {1}
    assert since.pass_time(0.4, 1)[1] == {1}


def test_the_status_names_a_worker_that_does_not_answer_and_how_long_it_may() -> None:
    line = Trained(3, min_workers=1)
    patience = [each.patience_s for each in line.bench.line.status(line.bench.now).workers]
    line.pass_time(1.5, 1, 2)

    status = line.bench.line.status(line.bench.now)
    assert patience == pytest.approx([0.14] * 3, abs=0.01)
    assert [each.detail for each in status.workers] == ["", *["does not answer, for 1 s"] * 2]
