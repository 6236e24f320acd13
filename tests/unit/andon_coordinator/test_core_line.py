"""Single rules of the core, where a transcript would hide the point."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from andon.protocol.capabilities import LEARNING
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.line_state import TRANSITIONS, LineState, Trigger, next_state
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.status import holds_up
from scenarios.line_bench import Bench


def _bench(workers: int = 2, batch: int = 4, dataset: int | None = 64) -> Bench:
    settings = LineSettings(
        run_id="7f3a", expect_workers=workers, min_workers=workers, max_workers=workers
    )
    return Bench(settings, RunPlan(global_batch=batch, dataset_size=dataset))


def _bootstrapped(bench: Bench) -> list[int]:
    """Streams of all expected workers, in sync at step 0."""
    workers = range(bench.settings.expect_workers)
    streams = [bench.join(f"w{each}", bench.request(each, each))[0] for each in workers]
    bench.send(on.RecordSaved(bench.journal.save_record()))
    if len(streams) > 1:  # who bootstrapped gives its state once it asks for work
        bench.send(on.WorkRequested(streams[0], bench.peers[streams[0]].head))
    for stream in streams[1:]:
        transfer = bench.peers[stream].transfer
        assert transfer is not None
        bench.peers[stream].head = transfer.head
        bench.send(on.StateReported(stream, transfer.transfer_id, transfer.head))
    return streams


def _assigned(bench: Bench, streams: list[int]) -> list[do.Assignment]:
    for stream in streams:
        effects = bench.send(on.WorkRequested(stream, bench.peers[stream].head))
    return [each.assignment for each in effects if isinstance(each, do.Assign)]


_Kind = TypeVar("_Kind")


def _only(effects: list[do.Effect], kind: type[_Kind]) -> _Kind:
    (found,) = [each for each in effects if isinstance(each, kind)]
    return found


def test_every_state_but_the_last_can_halt() -> None:
    states = set(LineState) - {LineState.COMPLETE}

    assert all(next_state(state, Trigger.HALTED) is LineState.HALTED for state in states)


def test_nothing_leaves_complete() -> None:
    assert all(state is not LineState.COMPLETE for state, _ in TRANSITIONS)


def test_every_state_is_reached_by_some_trigger() -> None:
    assert set(TRANSITIONS.values()) == set(LineState)


def test_a_trigger_that_is_not_in_the_table_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="ANSWERED can't happen in RUNNING"):
        next_state(LineState.RUNNING, Trigger.ANSWERED)


def _step(bench: Bench, streams: list[int], reporting: int) -> list[bool]:
    """A step in which so many report a digest; who was asked for one."""
    _assigned(bench, streams)
    asked = []
    for number, stream in enumerate(streams):
        digest = b"a" * 32 if number < reporting else b""
        head = bench.peers[stream].head
        asked += [each.wants_digest for each in [bench.peers[stream].assignment] if each]
        report = replace(bench.ready(stream), digest=digest, digest_head=head)
        bench.send(on.WorkerReady(stream, report))
    bench.send(on.RecordSaved(bench.journal.save_record()))
    return asked


def test_f_dp_001_weights_that_were_transferred_are_compared_in_the_next_complete_round() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    voided = [each.wants_digest for each in _assigned(bench, streams)]
    bench.send(on.CordPulled("this voids the round, so nothing is compared"))
    bench.send(on.HaltCleared(1, HaltAnswer.RETRY))

    asked = [_step(bench, streams, 2), _step(bench, streams, 2)]

    assert [voided, *asked] == [[True, True], [True, True], [False, False]]


@pytest.mark.parametrize("reporting", [1, 2])
def test_f_dp_001_weights_are_compared_after_a_restart_and_with_somebody_elses_alone(
    reporting: int,
) -> None:
    bench = _bench(workers=3)
    streams = _bootstrapped(bench)
    _step(bench, streams, 3)
    back = [bench.rejoin(stream, each, each) for each, stream in enumerate(streams)]
    bench.restart()
    streams = [bench.join(f"w{each}", back[each])[0] for each in range(3)]

    first, second = _step(bench, streams, reporting), _step(bench, streams, reporting)

    assert (first, second) == ([True] * 3, [False] * 3), "who was asked once is not asked again"
    left = {1: {0, 1, 2}, 2: {2}}[reporting]
    assert bench.line._core.uncompared == left
    # A roster that is another one may do better.
    bench.send(on.WorkerStreamEnded(streams[2], gone=True))
    bench.join("w2", bench.rejoin(streams[2], 2, 7))
    streams[2] = max(bench.peers)
    assert _step(bench, streams, 3) == [True] * 3
    assert not bench.line._core.uncompared


def test_a_digest_of_another_head_is_not_compared() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    _assigned(bench, streams)

    for stream, digest in zip(streams, (b"a" * 32, b"b" * 32), strict=True):
        report = replace(bench.ready(stream), digest=digest, digest_head=Key(1, 1))
        bench.send(on.WorkerReady(stream, report))

    assert bench.journal.pending_records


def test_correct_counts_add_up_only_if_all_workers_report_them() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    _assigned(bench, streams)

    bench.send(on.WorkerReady(streams[0], replace(bench.ready(streams[0]), correct=2)))
    bench.send(on.WorkerReady(streams[1], bench.ready(streams[1])))

    result = bench.journal.pending_records[0].result
    assert result is not None
    assert result.correct is None


def test_the_correct_count_of_all_workers_is_the_steps_and_is_shown() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    _assigned(bench, streams)

    for stream, correct in zip(streams, (2, 0), strict=True):
        bench.send(on.WorkerReady(stream, replace(bench.ready(stream), correct=correct)))
    bench.send(on.RecordSaved(bench.journal.save_record()))

    status = bench.line.status(bench.now)
    assert (status.correct, status.samples) == (2, 4)


def test_the_first_end_of_a_stream_of_samples_ends_the_epoch_for_all() -> None:
    bench = _bench(dataset=None)
    streams = _bootstrapped(bench)
    _assigned(bench, streams)

    bench.send(on.WorkerReady(streams[0], bench.ready(streams[0])))
    bench.send(on.WorkerReady(streams[1], replace(bench.ready(streams[1]), end_of_data=True)))

    assert bench.journal.pending_records[0].record.cursor == Cursor(1, 0)


def test_events_of_an_unknown_stream_have_no_effect() -> None:
    bench = _bench()

    assert bench.send(on.HeartbeatArrived(77, 1)) == []
    assert bench.send(on.WorkerStreamEnded(77)) == []


def test_a_halt_that_is_newer_than_the_head_stays_without_a_journal_as_its_workers_claim() -> None:
    bench = _bench()
    head, void = Key(1 << 32, 5), Key(1 << 32, 6)
    halt = HaltEvidence(
        id=4, reason=HaltReason.NON_FINITE_LOSS, step=3, key=void, worker=1, message="nan"
    )
    request = replace(bench.request(0, 0), head=head, step=2, cursor=Cursor(0, 8), halt=halt)

    _, effects = bench.join("w0", request)

    told = replace(halt, message="worker 0 says that the line had halted: nan", reported_by=0)
    assert _only(effects, do.SaveHalt).evidence == told
    assert _only(effects, do.AcceptJoin).halt == told


def test_a_halt_that_a_later_head_shows_to_be_answered_is_closed() -> None:
    bench = _bench()
    head, void, later = (Key(bench.journal.term, number) for number in (5, 6, 7))
    halt = HaltEvidence(id=4, reason=HaltReason.NON_FINITE_GRADIENT, step=3, key=void)
    bench.join("w0", replace(bench.request(0, 0), head=head, step=2, halt=halt))

    bench.join("w1", replace(bench.request(1, 1), head=later, step=3))

    assert bench.line.state is not LineState.HALTED
    assert bench.line.status(0.0).head == later


def test_a_term_below_the_journals_is_refused() -> None:
    with pytest.raises(ValueError, match="below the journal's"):
        LineCore(
            LineSettings(run_id="x"),
            term=1 << 32,
            history=History(greatest_term=2 << 32),
            random_bits=lambda: 0,
        )


def test_the_term_of_the_head_itself_is_refused() -> None:
    head = Record(Key(1 << 32, 1), None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,))

    with pytest.raises(ValueError, match="not above that of the head"):
        LineCore(
            LineSettings(run_id="x"),
            term=1 << 32,
            history=History(head=head),
            random_bits=lambda: 0,
        )


def test_the_status_shows_who_is_waited_for() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    _assigned(bench, streams)
    bench.send(on.WorkerReady(streams[0], bench.ready(streams[0])))
    bench.send(on.HeartbeatArrived(streams[1], 1, on.Activity.COMPUTING, "warming up"))

    status = bench.line.status(bench.now + 0.5)

    assert status.state is LineState.RUNNING
    assert (status.live, status.participating) == (2, 2)
    assert status.waiting_for == "worker 1 to finish step 1"
    assert status.workers[1].activity is on.Activity.COMPUTING
    assert status.workers[1].detail == "warming up"
    assert status.workers[1].rank == 1
    assert status.workers[1].heartbeat_age_s == 0.5


@pytest.mark.parametrize("grain", [0, 2])
def test_the_status_shows_the_grain_of_a_line_of_equal_bits(grain: int) -> None:
    bench = Bench(
        LineSettings(run_id="7f3a"), RunPlan(global_batch=4, grain=grain, tree=int(grain > 0))
    )

    before = bench.line.status(0.0).grain
    bench.join("w0", bench.request(0, 0))

    assert (before, bench.line.status(0.0).grain) == (0, grain)


def test_the_status_shows_how_far_a_worker_that_learns_has_come() -> None:
    settings = LineSettings(run_id="7f3a", expect_workers=1, min_workers=1, max_workers=2)
    bench = Bench(settings, RunPlan(global_batch=4, dataset_size=64))
    (stream,) = _bootstrapped(bench)

    def step() -> None:
        _assigned(bench, [stream])
        bench.send(on.WorkerReady(stream, bench.ready(stream)))
        bench.send(on.RecordSaved(bench.journal.save_record()))

    step()
    request = replace(bench.request(1, 1), capabilities=frozenset({LEARNING}))
    newcomer, _ = bench.join("w1", request)
    shown: list[tuple[str, int, int]] = []

    def note() -> None:
        learner = bench.line.status(bench.now).workers[1]
        assert learner.learns
        assert not learner.in_sync
        assert learner.activity is on.Activity.SYNCING
        shown.append((learner.detail, learner.steps_behind, learner.step))

    note()
    bench.send(on.ListeningReported(newcomer))
    step()
    note()
    transfer = bench.peers[newcomer].transfer
    assert transfer is not None
    bench.send(on.StateReported(newcomer, transfer.transfer_id, transfer.head))
    note()
    step()
    note()

    assert shown == [
        ("learning: waits for the state", 1, 0),
        ("learning: receives the state", 2, 0),
        ("learning: 1 step behind", 1, 1),
        ("learning: 2 steps behind", 2, 1),
    ]


def test_the_status_shows_the_result_of_the_last_step() -> None:
    bench = _bench()
    streams = _bootstrapped(bench)
    _assigned(bench, streams)
    bench.now = 2.0
    timings = on.StepTimings(exchange_s=0.5, wait_s=0.1)
    for stream in streams:
        report = replace(bench.ready(stream, loss=0.25), timings=timings)
        bench.send(on.WorkerReady(stream, report))
    bench.send(on.RecordSaved(bench.journal.save_record()))

    status = bench.line.status(bench.now)

    assert (status.step, status.loss, status.samples) == (1, 0.25, 4)
    assert status.samples_per_second == 2.0
    assert status.exchange_s == 0.5
    assert status.hidden_ratio == pytest.approx(0.8)
    assert status.workers[0].samples_per_second == 1.0
    assert status.workers[0].waiting_ratio == 0.05
    assert (status.workers[0].step_s, status.workers[0].timings) == (2.0, timings)


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        ({}, None),
        ({0: 0.0}, None),
        ({0: 0.02, 1: 0.06}, None),
        ({0: 0.60, 1: 0.01, 2: 0.55}, 1),
        ({0: 0.10, 1: 0.10, 2: 0.40}, 0),
    ],
)
def test_who_waits_least_holds_the_line_up_if_others_wait_much_longer(
    waits: dict[int, float], late: int | None
) -> None:
    assert holds_up(waits) == late


def test_newcomers_are_taken_until_the_line_is_drained_also_while_it_is_halted() -> None:
    bench = _bench()
    _assigned(bench, _bootstrapped(bench))
    taken = [bench.line.takes_newcomers]

    for event in (on.CordPulled("odd", "operator"), on.DrainRequested("operator")):
        bench.send(event)
        taken.append(bench.line.takes_newcomers)

    assert taken == [True, True, False]


def test_a_dropped_workers_own_token_is_barred_with_it() -> None:
    bench = _bench(workers=2)
    _bootstrapped(bench)
    bench.send(on.WorkerStreamEnded(list(bench.peers)[1], gone=True))
    named = replace(bench.request(1, 5), credential="gamma")
    bench.join("gamma", named)
    bench.send(on.CordPulled("worker 1 is odd"))
    bench.send(on.HaltCleared(1, HaltAnswer.DROP, worker=1))

    _, done = bench.join("gamma", replace(named, incarnation=6))

    assert "the worker that the token 'gamma' is for" in _only(done, do.RefuseJoin).refusal.message
