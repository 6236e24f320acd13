"""Whom the line asks why it is late, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.capabilities import EXPLAINS
from andon.protocol.run_settings import RunPlan
from andon.protocol.slowness import (
    CodeLine,
    Explanation,
    ProcessFacts,
    Slowness,
    SlowPhase,
    ThreadStack,
)
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.events import Activity, StepTimings
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.core.slow_cause import SlowCause, cause_of
from andon_coordinator.core.slow_words import by_timings, sentence
from scenarios.line_bench import Bench

TICK_S = 0.05
DATA, FORWARD, EXCHANGE, SCRIPT = (
    SlowPhase.DATA, SlowPhase.FORWARD, SlowPhase.EXCHANGE, SlowPhase.SCRIPT,
)  # fmt: skip


class Training:
    """Two workers that have made some steps of a tenth of a second."""

    def __init__(self, *, explains: bool = True) -> None:
        settings = LineSettings(run_id="7f3a", expect_workers=2, min_workers=1)
        self.bench = Bench(settings, RunPlan(global_batch=6, dataset_size=64000))
        self.able = frozenset({EXPLAINS}) if explains else frozenset[str]()
        self.streams = [self._join(worker) for worker in range(2)]
        self._saved()
        self._ask(self.streams[0])
        second = self.bench.peers[self.streams[1]]
        assert second.transfer is not None
        second.head = second.transfer.head
        self.bench.send(
            on.StateReported(self.streams[1], second.transfer.transfer_id, second.transfer.head)
        )
        self._ask_all()
        for _ in range(12):
            self.step()

    def step(self, *waits_s: float, seconds: float = 0.1) -> list[do.Effect]:
        """A step, in which each worker waited so long for the others."""
        done = self.pass_time(seconds)
        for number, stream in enumerate(self.streams):
            timings = StepTimings(wait_s=waits_s[number] if waits_s else 0.0, data_s=seconds / 2)
            ready = replace(self.bench.ready(stream), timings=timings)
            done += self.bench.send(on.WorkerReady(stream, ready))
        self._saved()
        self._ask_all()
        return done

    def pass_time(self, seconds: float) -> list[do.Effect]:
        done: list[do.Effect] = []
        for _ in range(round(seconds / TICK_S)):
            self.bench.now += TICK_S
            done += self.bench.send(on.TimePassed())
        return done

    def asked(self, seconds: float) -> dict[int, int]:
        """Who is asked meanwhile, and by which number."""
        found = [each for each in self.pass_time(seconds) if isinstance(each, do.SendExplain)]
        return {self.streams.index(each.stream): each.number for each in found}

    def answer(self, worker: int, number: int, phase: SlowPhase, **facts: float) -> list[do.Effect]:
        lines = (CodeLine("/u/dataset.py", 42, "__getitem__", own=True),)
        said = Explanation(
            number,
            phase,
            stacks=(ThreadStack("the script", lines),),
            facts=ProcessFacts(script_cores=0.02, **facts),  # type: ignore[arg-type]  # of numbers
        )
        return self.bench.send(on.ExplanationArrived(self.streams[worker], said))

    def _join(self, worker: int) -> int:
        request = replace(self.bench.request(worker, worker), capabilities=self.able)
        return self.bench.join(f"w{worker}", request)[0]

    def _ask(self, stream: int) -> None:
        self.bench.send(on.WorkRequested(stream, self.bench.peers[stream].head))

    def _ask_all(self) -> None:
        for stream in self.streams:
            self._ask(stream)

    def _saved(self) -> None:
        self.bench.send(on.RecordSaved(self.bench.journal.save_record()))


def told_in(effects: list[do.Effect]) -> list[Slowness]:
    return [each.slowness for each in effects if isinstance(each, do.NoteSlowness)]


def kept_in(effects: list[do.Effect]) -> list[Slowness]:
    return [each.slowness for each in effects if isinstance(each, do.SaveSlowness)]


def test_a_round_that_is_late_by_less_than_three_tenths_is_nobodys_fault() -> None:
    training = Training()

    assert training.asked(0.35) == {}
    assert training.asked(0.15).keys() == {0, 1}


def test_the_worker_that_the_others_wait_for_is_told_of_with_its_own_line() -> None:
    training = Training()
    asked = training.asked(0.5)

    nothing = training.answer(0, asked[0], EXCHANGE)
    done = training.answer(1, asked[1], DATA)

    assert told_in(nothing) == []
    (slow,) = told_in(done)
    assert (slow.worker, slow.phase, str(slow.guilty)) == (1, DATA, "dataset.py:42 in __getitem__")
    assert slow.text == (
        "worker 1 waits for data at `dataset.py:42 in __getitem__`: sleeping (2 % of a core used). "
        "Make that faster, or load ahead with more loading processes (num_workers)"
    )
    assert kept_in(done) == [slow]
    assert training.bench.line.status(0.0).workers[1].slowness == slow


def test_a_lateness_that_is_explained_is_not_asked_about_again() -> None:
    training = Training()
    for worker, number in training.asked(0.5).items():
        training.answer(worker, number, DATA if worker else EXCHANGE)

    assert training.asked(30.0) == {}


def test_where_nobody_waits_the_line_is_slow_as_a_whole_and_is_asked_again_later() -> None:
    training = Training()
    done = [
        each
        for worker, number in training.asked(0.5).items()
        for each in training.answer(worker, number, FORWARD)
    ]

    assert told_in(done) == []
    assert training.asked(0.7).keys() == {0, 1}


BUSY_HOST = {"waited_for_core": 0.6, "host_busy_cores": 2.0, "host_cores": 2, "busiest_cores": 1.5}


@pytest.mark.parametrize(
    ("phase", "facts"),
    [
        (FORWARD, BUSY_HOST),
        (EXCHANGE, {**BUSY_HOST, "waited_for_core": 0.0, "threads_waited": 0.9}),
    ],
)
def test_where_none_waits_or_all_do_the_worker_of_a_starved_host_is_named(
    phase: SlowPhase, facts: dict[str, float]
) -> None:
    training = Training()
    asked = training.asked(0.5)
    training.answer(0, asked[0], phase, waited_for_core=0.3, host_busy_cores=2.0)

    (slow,) = told_in(training.answer(1, asked[1], phase, **facts))

    # Both are of one host: the one that lacks more stands for it.
    assert slow.worker == 1
    assert "short of processor" in slow.text


def test_if_all_wait_the_network_of_who_has_most_to_send_is_slow() -> None:
    training = Training()
    asked = training.asked(0.5)
    training.answer(0, asked[0], EXCHANGE, unsent_bytes=0)

    (slow,) = told_in(training.answer(1, asked[1], EXCHANGE, unsent_bytes=2**20, delivered=1e5))

    assert (slow.worker, slow.phase) == (1, EXCHANGE)
    assert "1.0 MiB wait to be sent" in slow.text


def test_a_worker_whose_answer_comes_late_is_told_of_when_it_comes() -> None:
    training = Training()
    asked = training.asked(0.5)
    training.answer(0, asked[0], EXCHANGE)

    silence = training.pass_time(4.0)
    (slow,) = told_in(training.answer(1, asked[1], SCRIPT, held_s=4.0))

    assert told_in(silence) == []
    assert "kept Python's interpreter lock" in slow.text


def test_an_answer_that_was_taken_after_the_round_tells_of_the_next_one_and_is_left_out() -> None:
    training = Training()
    asked = training.asked(0.5)
    training.step()
    training.pass_time(0.3)

    stale = [*training.answer(0, asked[0], EXCHANGE), *training.answer(1, asked[1], SCRIPT)]

    assert told_in(stale) == []


def test_an_answer_that_nobody_asked_for_says_nothing() -> None:
    training = Training()
    asked = training.asked(0.5)

    unasked = training.answer(1, asked[1] + 7, DATA)

    assert told_in(unasked) == []


def test_a_worker_of_an_older_version_is_told_of_by_its_heartbeat() -> None:
    training = Training(explains=False)
    for worker, activity in enumerate((Activity.EXCHANGING, Activity.LOADING)):
        training.bench.send(on.HeartbeatArrived(training.streams[worker], 1, activity, "shards"))

    done = training.pass_time(0.5)

    (slow,) = told_in(done)
    assert (slow.worker, slow.phase) == (1, DATA)
    assert 'loading ("shards")' in slow.text


def test_one_that_is_last_in_every_step_is_told_of_by_its_times() -> None:
    training = Training()

    done = [each for _ in range(16) for each in training.step(0.06, 0.0)]
    again = [each for _ in range(16) for each in training.step(0.06, 0.0)]

    assert [slow.worker for slow in told_in(done)] == [1]
    assert told_in(again) == []


def test_one_step_in_which_it_stood_still_does_not_tell_of_all_steps() -> None:
    usual = {0: StepTimings(busy_s=0.1), 1: StepTimings(busy_s=0.16)}
    stall = {0: StepTimings(data_s=0.1), 1: StepTimings(data_s=2.1)}

    _, text = by_timings(1, [*[usual] * 11, stall])

    assert "its forward and backward took 60.0 ms longer a step" in text


def test_the_journal_keeps_a_few_an_hour_and_one_of_a_kind() -> None:
    training, kept, told = Training(), 0, 0
    for number in range(8):
        asked = training.asked(1.0)
        training.answer(0, asked[0], EXCHANGE)
        done = training.answer(1, asked[1], list(SlowPhase)[1:4][number % 3])
        kept, told = kept + len(kept_in(done)), told + len(told_in(done))
        training.step()

    assert (told, kept) == (8, 3)


@pytest.mark.parametrize(
    ("facts", "cause", "said"),
    [
        ({"held_s": 2.0}, SlowCause.LOCK, "interpreter lock"),
        ({"major_faults": 900.0, "swap_bytes": 2**30}, SlowCause.MEMORY, "1.0 GiB of it"),
        ({"gpu_mhz": 600.0, "gpu_most_mhz": 1980.0, "gpu_throttled": "thermal"}, SlowCause.GPU,
         "600 of 1980 MHz, held back (thermal)"),
        ({"waited_for_core": 0.5, "host_busy_cores": 4.0, "process_cores": 0.5, "host_cores": 4},
         SlowCause.NEIGHBOUR, "kept 3.5 of 4 cores busy, which it can't see"),
        ({"waited_for_core": 0.5, "host_busy_cores": 4.0, "busiest": "stress (9 processes, such as "
          "4711)", "busiest_cores": 3.0}, SlowCause.NEIGHBOUR, "3.0 of them stress (9 processes"),
        ({"cpu_pressure": 0.9, "script_cores": 0.3, "host_busy_cores": 4.0}, SlowCause.NEIGHBOUR,
         "waited for a core 90 % of the time"),
        ({"waited_for_core": 0.5, "host_busy_cores": 4.0, "process_cores": 4.0}, SlowCause.CORES,
         "its own threads"),
        ({"waited_for_core": 0.5, "host_busy_cores": 9.0, "process_cores": 1.0,
          "allowed_cores": 1.0}, SlowCause.CORES, "1.0 of 1 cores"),
        ({"throttled": 0.7, "allowed_cores": 0.5}, SlowCause.QUOTA,
         "may use 0.5 cores, and was held back 70 % of the time"),
        ({"stolen_cores": 1.2, "host_cores": 2, "script_cores": 0.4}, SlowCause.STOLEN,
         "others took 1.2 of its 2 cores"),
        ({"waited_for_disk": 0.9, "memory_pressure": 0.5, "largest": "java (process 812)",
          "largest_bytes": 2**33}, SlowCause.MEMORY, "8.0 GiB, has java (process 812)"),
        ({"waited_for_disk": 0.9}, SlowCause.DISK, "90 % of the time for the disk"),
        ({"script_cores": 0.97}, SlowCause.SCRIPT, "computing (97 % of a core used)"),
    ],
)  # fmt: skip
def test_what_surrounds_a_process_explains_more_than_its_line(
    facts: dict[str, float | str], cause: SlowCause, said: str
) -> None:
    answer = Explanation(1, FORWARD, facts=ProcessFacts(**facts))  # type: ignore[arg-type]  # by name

    assert cause_of(answer) is cause
    assert said in sentence(1, answer)


def test_what_the_script_says_that_it_is_busy_with_is_named() -> None:
    assert 'is in "upload"' in sentence(1, Explanation(1, SCRIPT, "upload"))


def test_a_line_in_a_loading_process_is_said_to_be_there() -> None:
    stacks = (
        ThreadStack("the script", (CodeLine("/u/train.py", 9, "main", own=True),)),
        ThreadStack("loading process 7", (CodeLine("/u/dataset.py", 42, "load", own=True),)),
    )
    facts = ProcessFacts(script_cores=0.0, children=1, child_cores=0.02)

    assert sentence(1, Explanation(1, DATA, stacks=stacks, facts=facts)).startswith(
        "worker 1 waits for data at `dataset.py:42 in load` in a loading process: 1 loading "
        "processes use 0.0 cores."
    )
