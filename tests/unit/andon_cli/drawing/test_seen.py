"""What a watcher makes of one status after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import CheckpointStatus, LineStatus, WorkerStatus
from andon_cli.drawing.seen import Seen, changes_between, happening_of
from andon_cli.drawing.texts import sparkline
from andon_coordinator.core.run_events import RunEvent, RunEventKind

WORKERS = (
    WorkerStatus(worker=0, rank=0, host="alpha", live=True),
    WorkerStatus(worker=1, rank=1, host="beta", live=True),
)
STATUS = LineStatus(
    run_id="7f3a", state="RUNNING", step=10, loss=2.0, total_steps=110, live=2, participating=2,
    workers=WORKERS, samples=64, samples_per_second=640.0,
)  # fmt: skip
NAN = HaltEvidence(
    id=5, reason=HaltReason.NON_FINITE_LOSS, step=11, worker=1, message="worker 1's loss is nan"
)


def told(before: LineStatus, after: LineStatus) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in changes_between(before, after, 100.0)]


def test_a_status_that_brings_a_step_alone_is_no_event() -> None:
    assert told(STATUS, replace(STATUS, step=11, loss=1.9)) == []


def test_workers_that_come_and_go_are_told_by_how_they_went() -> None:
    first, second = WORKERS
    without = replace(STATUS, workers=(first,))
    gone = replace(STATUS, workers=(first, replace(second, live=False)))
    left = replace(STATUS, workers=(first, replace(second, live=False, final_digest="9c1e04")))

    assert told(without, STATUS) == [("joined", "worker 1 joined (beta)")]
    assert told(STATUS, gone) == [("lost", "worker 1 was lost (beta)")]
    assert told(gone, STATUS) == [("joined", "worker 1 joined (beta)")]
    assert told(STATUS, left) == [("left", "worker 1 left")]
    assert told(STATUS, without) == [("dropped", "worker 1 was dropped")]


def test_a_worker_that_was_behind_is_told_of_once_it_takes_part() -> None:
    first, second = WORKERS
    learns = replace(second, rank=None, activity="syncing", step=10)
    before = replace(STATUS, workers=(replace(first, step=10), learns))

    assert told(before, STATUS) == [("caught_up", "worker 1 has caught up (beta)")]
    assert told(before, before) == []


def test_the_sender_of_a_transfer_has_not_caught_up() -> None:
    donor, joiner = (replace(each, rank=None, activity="syncing") for each in WORKERS)
    before = replace(STATUS, state="SYNCING", workers=(replace(donor, step=10), joiner))

    assert told(before, STATUS) == [("caught_up", "worker 1 has caught up (beta)")]
    assert told(replace(before, step=0), STATUS) == []


def test_a_spare_is_told_of_as_one_and_so_is_the_moment_at_which_it_takes_a_place() -> None:
    first, second = WORKERS
    spare = replace(second, rank=None, detail="spare: ready")

    with_spare = replace(STATUS, workers=(first, spare))

    assert told(replace(STATUS, workers=(first,)), with_spare) == [
        ("joined", "worker 1 joined as a spare (beta)")
    ]
    assert told(with_spare, STATUS) == [("joined", "worker 1 took a lost worker's place")]


def test_a_halt_and_its_answer_are_told_once() -> None:
    halted = replace(STATUS, state="HALTED", halt=NAN)

    assert told(STATUS, halted) == [
        ("halted", "HALTED at step 11: worker 1's loss is nan. No weight moved.")
    ]
    assert told(halted, halted) == []
    assert told(halted, STATUS) == [("answered", "the halt at step 11 was answered")]


def test_an_attempt_a_roll_back_and_the_end_are_told() -> None:
    assert told(STATUS, replace(STATUS, attempt=1)) == [
        ("attempt", "step 11 is tried again, attempt 1")
    ]
    assert told(STATUS, replace(STATUS, step=4)) == [
        ("attempt", "went back from step 10 to step 4")
    ]
    assert told(STATUS, replace(STATUS, state="COMPLETE", step=110, stop_reason="steps")) == [
        ("complete", "complete after step 110")
    ]
    assert told(STATUS, replace(STATUS, state="COMPLETE", stop_reason="drained")) == [
        ("complete", "complete after step 10 (drained)")
    ]


def test_checkpoints_are_told_and_those_that_are_missing() -> None:
    first = replace(STATUS, checkpoints=CheckpointStatus(writer=0, step=5))

    assert told(STATUS, first) == [("checkpoint", "checkpoint at step 5")]
    assert told(first, replace(STATUS, checkpoints=CheckpointStatus(writer=0, step=5))) == []
    assert told(first, replace(STATUS, checkpoints=CheckpointStatus(step=5, overdue=10))) == [
        ("checkpoint_missed", "there is no checkpoint of step 10")
    ]


def test_the_eta_follows_the_pace_of_the_last_minute() -> None:
    seen = Seen()
    seen.note(STATUS, 0.0, 0.0)
    at_first = seen.eta_s

    for second in range(1, 201):  # first a step a second, then one in two
        step = 10 + (second if second <= 50 else 50 + (second - 50) // 4)
        seen.note(replace(STATUS, step=step, total_steps=1000), float(second), 0.0)

    assert at_first == pytest.approx(0.1 * 100)
    assert seen.step_s == pytest.approx(4.0, rel=0.05)
    assert seen.eta_s == pytest.approx(4.0 * (1000 - 97), rel=0.05)


def test_time_in_which_the_line_waited_for_an_answer_is_no_part_of_its_pace() -> None:
    seen = Seen()
    seen.note(STATUS, 0.0, 0.0)
    seen.note(replace(STATUS, step=20), 10.0, 0.0)
    seen.note(replace(STATUS, step=20, state="HALTED", halt=NAN), 500.0, 0.0)
    seen.note(replace(STATUS, step=20), 1000.0, 0.0)

    seen.note(replace(STATUS, step=21), 1001.0, 0.0)

    assert seen.step_s == pytest.approx(1.0)


def test_losses_go_on_where_the_journal_ended() -> None:
    seen = Seen([3.0, 2.5, 2.0], first_step=10)

    for step, loss in ((10, 2.0), (11, 1.5), (11, 1.5), (12, 1.0)):
        seen.note(replace(STATUS, step=step, loss=loss), 0.0, 0.0)

    assert list(seen.losses) == [3.0, 2.5, 2.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("kind", "worker", "text", "told"),
    [
        ("started", None, "the run began", "the run began"),
        ("joined", 1, "on beta (NVIDIA L4)", "worker 1 joined on beta (NVIDIA L4)"),
        ("caught_up", 1, "learnt the line's state in 3.10 s",
         "worker 1 learnt the line's state in 3.10 s"),
        ("left", 1, "complete", "worker 1 left (complete)"),
        ("lost", 1, "lost: its connection broke", "worker 1 left (lost: its connection broke)"),
        ("dropped", 1, "dropped", "worker 1 left (dropped)"),
        ("attempt", None, "attempt 2: worker 1 is lost",
         "step 7 is tried again, attempt 2: worker 1 is lost"),
        ("halted", 1, "operator: odd", "HALTED at step 7: operator: odd"),
        ("answered", None, "skip by lea", "the halt at step 7 was answered: skip by lea"),
        ("overflow", None, "no weight moved", "no weight moved"),
        ("checkpoint", 0, "/runs/7f3a", "checkpoint at step 7"),
        ("checkpoint_missed", 0, "disk full", "there is no checkpoint of step 7: disk full"),
        ("went_back", None, "went on after step 7", "went on after step 7"),
        ("complete", None, "after 7 steps", "complete after 7 steps"),
    ],
)  # fmt: skip
def test_an_event_of_the_journal_is_told_in_a_sentence(
    kind: str, worker: int | None, text: str, told: str
) -> None:
    event = RunEvent(id=1, kind=RunEventKind(kind), worker=worker, step=7, text=text, at_unix_s=5.0)

    happening = happening_of(event)

    assert (happening.kind, happening.text, happening.at_unix_s) == (kind, told, 5.0)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([2.0, 2.0], 8, "▁▁"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([0.0, float("nan"), 7.0], 8, "▁×█"),
    ],
)
def test_a_sparkline_shows_the_whole_series_in_its_width(
    values: list[float], width: int, drawn: str
) -> None:
    assert sparkline(values, width) == drawn


def test_a_sparkline_of_ascii_draws_the_lowest_value_too() -> None:
    assert sparkline([0.0, 7.0, float("nan")], 8, ascii_only=True) == "_#x"
