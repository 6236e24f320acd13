"""The line's metrics: what happened, once it is durable, with bounded labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from andon.host.telemetry import ExchangeDurations
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan, Topology
from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.join_answers import JoinStatus
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.core.verification import Proved, VerifiedTotals
from andon_coordinator.telemetry import AttemptCause, LineMetrics, ServedRun, Totals
from scenarios import line_values

FIRST, SECOND = Key(1, 1), Key(1, 2)
PLAN = RunPlan(global_batch=4, dataset_size=8)


def openmetrics(registry: CollectorRegistry) -> bytes:
    """What a scraper gets that asks for OpenMetrics, as Prometheus does."""
    encode, _ = choose_encoder("application/openmetrics-text")
    return encode(registry)


class Metered:
    """Metrics, and what they show."""

    def __init__(self, totals: Totals | None = None, *, timed: bool = False) -> None:
        """`timed`: it times exchanges, as those of a ring."""
        self.registry = CollectorRegistry()
        exchanges = ExchangeDurations(self.registry) if timed else None
        topology = Topology.RING if timed else Topology.STAR
        run = ServedRun(run_id="7f3a", topology=topology)
        self.metrics = LineMetrics(
            self.registry,
            totals or Totals(),
            exchanges=exchanges or ExchangeDurations(CollectorRegistry()),
            run=run,
        )

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def see(self, event: events.Event, *done: effects.Effect, at: float = 0.0) -> None:
        self.metrics.observe(event, done, at)

    def join(self, stream: int, worker: int, mistaken_s: float | None = None) -> None:
        request = events.JoinRequest(run_id="7f3a", incarnation=1, layout=Layout(()), plan=PLAN)
        accept = line_values.accepted(stream=stream, worker=worker)
        accept = replace(accept, mistaken_s=mistaken_s)
        self.see(events.WorkerJoined(stream, request), accept)

    def assign(self, key: Key, attempt: int, at: float = 0.0) -> None:
        assignments = [
            effects.Assign(
                stream,
                line_values.assignment(key=key, rank=rank, attempt=attempt),
            )
            for rank, stream in enumerate((10, 11))
        ]
        self.see(events.WorkRequested(11, None), *assignments, at=at)

    def ready(
        self,
        stream: int,
        key: Key,
        *done: effects.Effect,
        at: float,
        waited_s: float = 0.0,
        exchanged_s: float = 0.0,
    ) -> None:
        ready = line_values.ready(
            key=key, timings=events.StepTimings(wait_s=waited_s, exchange_s=exchanged_s)
        )
        self.see(events.WorkerReady(stream, ready), *done, at=at)


def step(key: Key, correct: int | None = None, *, overflow: bool = False) -> effects.SaveRecord:
    result = line_values.result(loss=1.5, seconds=0.3, correct=correct, overflow=overflow)
    return effects.SaveRecord(Record(key, None, RecordKind.STEP, 1, Cursor(0, 4), (0, 1)), result)


def halt(reason: HaltReason) -> effects.SaveHalt:
    return effects.SaveHalt(HaltEvidence(id=1, reason=reason, step=1))


def voided(stream: int, key: Key) -> effects.SendVoided:
    return effects.SendVoided(stream, key, "a worker was lost")


def test_closed_sets_of_labels_are_there_at_zero_from_the_start() -> None:
    metered = Metered()

    for reason in HaltReason:
        assert metered.value("andon_jidoka_halts_total", reason=reason.label) == 0
    for cause in AttemptCause:
        assert metered.value("andon_step_attempts_total", cause=cause.value) == 0
    for state in LineState:
        assert metered.value("andon_line_state", state=state.name.lower()) == 0
    for label in ("live", "participating", "learning"):
        assert metered.value("andon_workers", state=label) == 0
    assert metered.value("andon_steps_committed_total") == 0
    assert metered.value("andon_recovery_seconds_count") == 0


def test_counters_begin_at_what_the_journal_holds() -> None:
    metered = Metered(Totals(steps=7, samples=28, halts={HaltReason.OPERATOR: 2}))

    assert metered.value("andon_steps_committed_total") == 7
    assert metered.value("andon_samples_committed_total") == 28
    assert metered.value("andon_jidoka_halts_total", reason="operator") == 2


def test_step_counts_once_it_is_durable_not_before() -> None:
    metered = Metered()
    metered.ready(11, FIRST, step(FIRST), at=1.0)
    assert metered.value("andon_steps_committed_total") == 0

    metered.see(events.RecordSaved(FIRST))

    assert metered.value("andon_steps_committed_total") == 1
    assert metered.value("andon_samples_committed_total") == 4
    assert metered.value("andon_step_loss") == 1.5
    assert metered.value("andon_step") == 1
    assert metered.value("andon_step_seconds_sum") == 0.3


def test_a_step_that_overflowed_counts_as_a_step_and_as_an_overflow() -> None:
    metered = Metered()

    for key, overflow in ((FIRST, True), (Key(FIRST.term, FIRST.round + 1), False)):
        metered.ready(11, key, step(key, overflow=overflow), at=1.0)
        metered.see(events.RecordSaved(key))

    assert metered.value("andon_steps_committed_total") == 2
    assert metered.value("andon_steps_overflowed_total") == 1


def test_step_that_the_journal_refused_does_not_count() -> None:
    metered = Metered()
    metered.ready(11, FIRST, step(FIRST), at=1.0)

    metered.see(events.JournalFailed("disk full"), halt(HaltReason.JOURNAL))
    metered.see(events.RecordSaved(FIRST))

    assert metered.value("andon_steps_committed_total") == 0
    assert metered.value("andon_jidoka_halts_total", reason="journal") == 1


def test_a_mark_is_not_counted_as_a_step() -> None:
    metered = Metered()
    mark = Record(FIRST, None, RecordKind.MARK, 1, Cursor(0, 4), ())
    metered.see(events.HaltCleared(1, HaltAnswer.SKIP), effects.SaveRecord(mark))

    metered.see(events.RecordSaved(FIRST))

    assert metered.value("andon_steps_committed_total") == 0


def test_waiting_time_is_what_the_workers_of_a_committed_step_reported() -> None:
    metered = Metered()
    metered.join(10, 0)
    metered.join(11, 1)
    metered.assign(FIRST, 0)

    metered.ready(10, FIRST, at=1.0, waited_s=2.5)
    metered.ready(11, FIRST, step(FIRST), at=3.5, waited_s=0.25)
    assert metered.value("andon_worker_wait_seconds_count", worker="0") == 0
    metered.see(events.RecordSaved(FIRST), at=3.6)

    assert metered.value("andon_worker_wait_seconds_sum", worker="0") == 2.5
    assert metered.value("andon_worker_wait_seconds_sum", worker="1") == 0.25
    assert metered.value("andon_worker_wait_seconds_count", worker="1") == 1


@pytest.mark.parametrize("timed", [True, False])
def test_an_exchange_of_a_ring_takes_as_long_as_the_slowest_rank_reported(timed: bool) -> None:
    metered = Metered(timed=timed)
    for stream, worker in ((10, 0), (11, 1)):
        metered.join(stream, worker)
    metered.assign(FIRST, 0)

    metered.ready(10, FIRST, at=1.0, exchanged_s=0.03)
    metered.ready(11, FIRST, step(FIRST), at=1.0, exchanged_s=0.02)
    assert not metered.value("andon_allreduce_seconds_count"), "not before it is committed"
    metered.see(events.RecordSaved(FIRST), at=1.0)

    assert metered.value("andon_allreduce_seconds_sum") == (0.03 if timed else None)


def test_loss_and_accuracy_are_absent_before_the_first_step() -> None:
    metered = Metered()
    metered.assign(FIRST, 0)

    assert metered.value("andon_step_loss") is None
    assert metered.value("andon_step_accuracy_ratio") is None


def test_accuracy_is_absent_until_all_workers_report_correct_counts() -> None:
    metered = Metered()
    metered.assign(FIRST, 0)
    metered.ready(10, FIRST, step(FIRST), at=0.5)
    metered.see(events.RecordSaved(FIRST), at=0.5)
    assert metered.value("andon_step_accuracy_ratio") is None

    metered.ready(10, FIRST, step(FIRST, correct=3), at=1.0)
    metered.see(events.RecordSaved(FIRST), at=1.0)

    assert metered.value("andon_step_accuracy_ratio") == 0.75


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (events.WorkerStreamEnded(11, gone=True), AttemptCause.STREAM_LOST),
        (events.TimePassed(), AttemptCause.LEASE_LAPSED),
        (events.WorkerLeft(11, events.LeaveReason.FAILED), AttemptCause.LEFT),
        (
            events.FaultReported(11, events.Fault(kind=events.FaultKind.DATA_STREAM_LOST)),
            AttemptCause.FAULT,
        ),
        (
            events.FaultReported(11, events.Fault(kind=events.FaultKind.CORRUPT_CHUNK)),
            AttemptCause.CORRUPT,
        ),
    ],
)
def test_attempt_counts_by_what_voided_the_one_before(
    event: events.Event, cause: AttemptCause
) -> None:
    metered = Metered()
    metered.assign(FIRST, 0)

    metered.see(event, voided(10, FIRST), at=2.0)
    metered.assign(SECOND, 1, at=3.0)
    metered.ready(10, SECOND, step(SECOND), at=4.0)
    metered.see(events.RecordSaved(SECOND), at=5.0)

    assert metered.value("andon_step_attempts_total", cause="first") == 1
    assert metered.value("andon_step_attempts_total", cause=cause.value) == 1
    assert metered.value("andon_recovery_seconds_count") == 1
    assert metered.value("andon_recovery_seconds_sum") == 3.0


def test_a_halt_does_not_count_as_recovery() -> None:
    metered = Metered()
    metered.assign(FIRST, 0)

    metered.see(events.CordPulled("odd"), halt(HaltReason.OPERATOR), at=1.0)
    metered.assign(SECOND, 1, at=100.0)
    metered.ready(10, SECOND, step(SECOND), at=101.0)
    metered.see(events.RecordSaved(SECOND), at=101.0)

    assert metered.value("andon_step_attempts_total", cause="halt") == 1
    assert metered.value("andon_recovery_seconds_count") == 0


def test_status_shows_state_and_the_ages_of_live_workers_only() -> None:
    settings = LineSettings(run_id="7f3a", expect_workers=2, min_workers=2, max_workers=2)
    line = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    metered = Metered()
    request = events.JoinRequest(run_id="7f3a", incarnation=1, layout=Layout(()), plan=PLAN)
    line.receive(events.WorkerJoined(10, request), 5.0)

    status = line.status(6.5)
    (worker,) = status.workers
    metered.metrics.tick(replace(status, workers=(replace(worker, share=0.75, micro_batches=3),)))
    assert metered.value("andon_line_state", state="forming") == 1
    assert metered.value("andon_worker_share_ratio", worker="0") == 0.75
    assert metered.value("andon_worker_micro_batches", worker="0") == 3
    assert metered.value("andon_workers", state="live") == 1
    assert metered.value("andon_heartbeat_age_seconds", worker="0") == 1.5

    line.receive(events.WorkerStreamEnded(10, gone=True), 7.0)
    metered.metrics.tick(line.status(7.0))
    assert metered.value("andon_workers", state="live") == 0
    assert metered.value("andon_heartbeat_age_seconds", worker="0") is None
    assert metered.value("andon_worker_share_ratio", worker="0") is None


def live_status(*workers: int) -> LineSnapshot:
    """The status of a line on which these workers are live."""
    most = max(len(workers), 1)
    settings = LineSettings(run_id="7f3a", expect_workers=most, min_workers=1, max_workers=most)
    line = LineCore(settings, term=1, history=History(), random_bits=lambda: 0)
    for worker in workers:
        request = line_values.joining(incarnation=worker + 1)
        line.receive(events.WorkerJoined(10 + worker, request), 0.0)
    return line.status(0.0)


def test_a_halt_stands_in_a_gauge_until_it_is_answered() -> None:
    metered = Metered()
    assert metered.value("andon_halted", reason="non_finite_loss") == 0

    metered.see(events.CordPulled("odd"), halt(HaltReason.NON_FINITE_LOSS))
    assert metered.value("andon_halted", reason="non_finite_loss") == 1
    assert metered.value("andon_halted", reason="operator") == 0
    metered.metrics.tick(live_status())

    assert metered.value("andon_halted", reason="non_finite_loss") == 0
    assert metered.value("andon_jidoka_halts_total", reason="non_finite_loss") == 1


def test_a_halt_that_the_journal_left_open_is_shown_from_the_first_status_on() -> None:
    metered = Metered()
    evidence = HaltEvidence(id=1, reason=HaltReason.LOSS_SPIKE, step=3)

    metered.metrics.tick(replace(live_status(), halt=evidence))

    assert metered.value("andon_halted", reason="loss_spike") == 1


def test_answers_and_departures_begin_at_what_the_journal_holds() -> None:
    metered = Metered(Totals(answers={HaltAnswer.SKIP: 2}, departures={"lost": 1, "failed": 3}))

    metered.see(events.TimePassed(), effects.SaveAnswer(1, HaltAnswer.SKIP, None, "ada"))
    metered.see(
        events.TimePassed(),
        effects.SaveDeparture(0, None, "its connection broke", 7, b""),
        effects.SaveDeparture(1, None, "dropped", 7, b"", dropped=True),
        effects.SaveDeparture(2, events.LeaveReason.COMPLETE, "", 9, b""),
    )

    assert metered.value("andon_halt_answers_total", answer="skip") == 3
    assert metered.value("andon_halt_answers_total", answer="retry") == 0
    shown = {
        reason: metered.value("andon_departures_total", reason=reason)
        for reason in ("lost", "dropped", "complete", "failed", "halted")
    }
    assert shown == {"lost": 2, "dropped": 1, "complete": 1, "failed": 3, "halted": 0}


def test_every_kind_of_fault_and_every_status_of_a_join_is_counted() -> None:
    metered = Metered()
    for kind in events.FaultKind:
        assert metered.value("andon_faults_total", kind=kind.name.lower()) == 0
    for status in JoinStatus:
        assert metered.value("andon_joins_total", status=status.name.lower()) == 0

    metered.join(10, 0)
    metered.see(events.FaultReported(10, events.Fault(kind=events.FaultKind.SCRIPT_RAISED)))

    assert metered.value("andon_faults_total", kind="script_raised") == 1
    assert metered.value("andon_joins_total", status="fresh") == 1


def test_a_worker_that_is_gone_leaves_no_waiting_behind() -> None:
    metered = Metered()
    for worker in (0, 1):
        metered.join(10 + worker, worker)
    status = live_status(0, 1)
    metered.metrics.tick(status)
    assert metered.value("andon_worker_wait_seconds_count", worker="1") == 0

    here = tuple(each for each in status.workers if each.worker == 0)
    metered.metrics.tick(replace(status, workers=here, live=1))

    # A rate of 0 would name the worker that is gone as the one that all others wait for.
    assert metered.value("andon_worker_wait_seconds_count", worker="1") is None
    assert metered.value("andon_worker_wait_ratio", worker="1") is None
    assert metered.value("andon_worker_wait_seconds_count", worker="0") == 0


def test_a_worker_that_went_before_its_step_was_durable_is_not_shown_again() -> None:
    metered = Metered()
    for worker in (0, 1):
        metered.join(10 + worker, worker)
    metered.assign(FIRST, 0)
    metered.ready(10, FIRST, at=1.0, waited_s=2.5)
    metered.ready(11, FIRST, step(FIRST), at=1.0, waited_s=0.5)

    metered.metrics.tick(live_status(0))
    metered.see(events.RecordSaved(FIRST), at=1.1)

    assert metered.value("andon_worker_wait_seconds_sum", worker="0") == 2.5
    assert metered.value("andon_worker_wait_seconds_sum", worker="1") is None


def test_a_worker_that_came_and_went_between_two_statuses_does_no_harm() -> None:
    metered = Metered()
    metered.join(10, 0)

    metered.metrics.tick(live_status())

    assert metered.value("andon_worker_wait_seconds_count", worker="0") is None


def test_a_status_shows_what_was_expected_and_how_fast_each_worker_is() -> None:
    metered = Metered()
    status = live_status(0)
    worker = replace(status.workers[0], waiting_ratio=0.25, samples_per_second=812.0)
    assert metered.value("andon_steps_planned") is None

    metered.metrics.tick(
        replace(status, workers=(worker,), expect_workers=4, expect_reducers=2, total_steps=1000)
    )

    assert metered.value("andon_workers_expected") == 4
    assert metered.value("andon_reducers_expected") == 2
    assert metered.value("andon_steps_planned") == 1000
    assert metered.value("andon_worker_wait_ratio", worker="0") == 0.25
    assert metered.value("andon_worker_samples_per_second", worker="0") == 812.0


def test_the_run_is_named_with_the_schedule_that_it_has_now() -> None:
    metered = Metered()
    of_run = {"run": "7f3a", "topology": "star", "encoding": "float32", "answers": "float32"}

    metered.metrics.tick(replace(live_status(), schedule="every-step"))
    metered.metrics.tick(replace(live_status(), schedule="cadence"))

    assert metered.value("andon_run_info", schedule="cadence", **of_run) == 1
    assert metered.value("andon_run_info", schedule="every-step", **of_run) is None


def test_a_window_and_what_is_computed_ahead_of_it_are_shown() -> None:
    metered = Metered()
    assert metered.value("andon_learning_rate_scale") == 1
    assignment = line_values.assignment(
        key=FIRST,
        roster=(0,),
        batch=PositionRange(0, 64),
        ahead_batch=PositionRange(64, 96),
        learning_rate_scale=2.0,
    )

    metered.see(events.WorkRequested(10, None), effects.Assign(10, assignment))

    assert metered.value("andon_window_samples") == 64
    assert metered.value("andon_window_ahead_samples") == 32
    assert metered.value("andon_learning_rate_scale") == 2


def test_the_noise_scale_of_gradients_is_absent_until_it_is_known() -> None:
    metered = Metered()

    metered.metrics.tick(live_status())
    unknown = metered.value("andon_gradient_noise_scale_samples")
    metered.metrics.tick(replace(live_status(), noise_scale=912.0))

    assert unknown is None
    assert metered.value("andon_gradient_noise_scale_samples") == 912


def test_a_halt_does_not_count_as_a_pause_for_newcomers() -> None:
    metered = Metered()
    transfer = effects.SendTransfer(
        stream=10,
        transfer_id=1,
        role=TransferRole.SEND,
        head=FIRST,
        step=1,
        cursor=Cursor(0, 4),
        peer=1,
    )
    metered.see(events.TimePassed(), transfer, at=1.0)

    metered.see(events.CordPulled("odd"), halt(HaltReason.OPERATOR), at=2.0)
    metered.assign(SECOND, 1, at=3600.0)

    assert metered.value("andon_join_pause_seconds_count") == 0


def test_the_time_of_the_last_checkpoint_is_absent_before_the_first() -> None:
    metered = Metered()
    metered.metrics.wall = lambda: 1700.0
    assert metered.value("andon_checkpoint_timestamp_seconds") is None

    metered.see(events.TimePassed(), effects.NoteCheckpoint(0, 100, "step-00000100"))
    status = replace(live_status(), checkpoints=RunCheckpoints(every=50, step=100))
    metered.metrics.tick(status)

    assert metered.value("andon_checkpoint_timestamp_seconds") == 1700.0
    assert metered.value("andon_checkpoint_step") == 100
    assert metered.value("andon_checkpoint_interval_steps") == 50


def test_writes_to_the_journal_are_timed() -> None:
    metered = Metered()

    metered.metrics.wrote(0.0002, 7)
    metered.metrics.wrote(0.5, None)

    assert metered.value("andon_journal_write_seconds_count") == 2
    assert metered.value("andon_journal_write_seconds_bucket", le="0.00025") == 1


def test_a_slow_step_leads_to_its_number_by_an_exemplar() -> None:
    metered = Metered()
    metered.ready(11, FIRST, step(FIRST), at=1.0)
    metered.see(events.RecordSaved(FIRST))

    text = openmetrics(metered.registry).decode()

    (line,) = [each for each in text.splitlines() if ' # {step="1"}' in each]
    assert line.startswith('andon_step_seconds_bucket{le="0.5"} 1.0')


def test_a_logged_value_is_the_mean_over_workers_at_the_newest_step() -> None:
    metered = Metered()
    assert metered.value("andon_logged_value", name="val") is None

    def log(worker: int, step: int, value: float) -> None:
        scalars = (Scalar("val", step, value),)
        metered.see(events.TimePassed(), effects.SaveScalars(worker, scalars))

    log(0, 7, 1.0)
    log(1, 7, 2.0)
    assert metered.value("andon_logged_value", name="val") == 1.5
    log(0, 8, 0.5)
    log(1, 7, 9.0)  # Sent again, late.

    assert metered.value("andon_logged_value", name="val") == 0.5


def test_two_lines_in_one_registry_are_refused() -> None:
    metered = Metered()

    with pytest.raises(ValueError, match="Duplicated"):
        LineMetrics(metered.registry, Totals())


def test_workers_that_learn_are_counted_with_how_far_each_is_behind() -> None:
    metered = Metered()
    status = live_status(0, 1)
    trains, learns = status.workers
    learns = replace(learns, learns=True, steps_behind=12)

    metered.metrics.tick(replace(status, workers=(replace(trains, steps_behind=0), learns)))
    assert metered.value("andon_workers", state="learning") == 1
    assert metered.value("andon_worker_steps_behind", worker="1") == 12
    assert metered.value("andon_worker_steps_behind", worker="0") == 0

    metered.metrics.tick(live_status(0))
    assert metered.value("andon_workers", state="learning") == 0
    assert metered.value("andon_worker_steps_behind", worker="1") is None


def test_a_worker_that_learnt_counts_with_its_time_and_with_what_the_line_waited_for_it() -> None:
    metered = Metered()

    metered.see(events.TimePassed(), effects.NoteCaughtUp(1, 3.0, 0.25, learnt=True))
    metered.see(events.TimePassed(), effects.NoteCaughtUp(2, 1.5, 1.5, learnt=False))

    assert metered.value("andon_learning_seconds_count") == 1
    assert metered.value("andon_learning_seconds_sum") == 3.0
    assert metered.value("andon_learning_wait_seconds_total") == 0.25


def test_a_state_that_is_sent_while_the_line_trains_is_no_pause() -> None:
    metered = Metered()
    sent = effects.SendTransfer(
        stream=10, transfer_id=1, role=TransferRole.SEND, head=FIRST, step=1,
        cursor=Cursor(0, 4), peer=1, beside_training=True,
    )  # fmt: skip

    metered.see(events.WorkRequested(10, None), sent, at=1.0)
    metered.assign(SECOND, 0, at=1.0)

    assert metered.value("andon_join_pause_seconds_count") == 0


def test_a_worker_whose_process_is_stopped_counts_once_the_line_goes_on_without_it() -> None:
    metered = Metered()
    stopped = events.WorkerStopped(10, 0.2)

    metered.see(stopped)  # The line can't do without it.
    assert metered.value("andon_workers_stopped_total") == 0
    metered.see(stopped, effects.SaveDeparture(0, None, "its process has been stopped", 7, b""))

    assert metered.value("andon_workers_stopped_total") == 1
    assert metered.value("andon_departures_total", reason="lost") == 1


def test_suspected_workers_count_and_so_do_those_that_come_back_soon() -> None:
    metered = Metered()
    gone = effects.SaveDeparture(0, None, "silent for 0.15 s when asked", 7, b"")

    metered.see(events.TimePassed(), effects.NoteSuspected(0, 0.15, 0.004), gone)
    assert metered.value("andon_workers_suspected_total") == 1
    assert metered.value("andon_workers_suspected_wrongly_total") == 0
    metered.join(10, 0, mistaken_s=0.5)

    assert metered.value("andon_workers_suspected_wrongly_total") == 1
    assert metered.value("andon_departures_total", reason="lost") == 1


def test_verification_counts_what_is_durable_and_what_differed() -> None:
    metered = Metered(Totals(verified=VerifiedTotals(steps=2, grains=9, convicted=[1])))
    proved = Proved(grains=4, drawn=True)

    metered.ready(11, FIRST, replace(step(FIRST), proved=proved), at=1.0)
    metered.see(events.RecordSaved(FIRST), effects.NoteDifference(2, "grain 3", (0, 1)))
    verdict = effects.SaveVerdict(step=2, key=FIRST, worker=0, text="", evidence="[]")
    metered.see(events.TimePassed(), verdict, replace(verdict, worker=None))

    names = ("verified_steps", "verified_grains", "verification_differences", "convictions")
    assert [metered.value(f"andon_{name}_total") for name in names] == [3, 13, 1, 2]
