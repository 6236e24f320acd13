"""The chronicle: what people are told follows from what the core received and did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_coordinator.core import effects, events
from andon_coordinator.core.chronicle import Chronicle
from andon_coordinator.core.line_state import LineState
from scenarios import line_values

TICK = events.TimePassed()


class Telling:
    """A chronicle, and what it told after its first event."""

    def __init__(self, *, resumed: bool = False) -> None:
        self.chronicle = Chronicle(next_id=7, step=3, resumed=resumed)
        self.first = self.told(TICK)

    def told(
        self,
        event: events.Event,
        *done: effects.Effect,
        state: LineState = LineState.RUNNING,
        step: int = 3,
    ) -> list[tuple[str, int | None, int, str]]:
        found = self.chronicle.receive(event, done, wall=100.0, state=state, step=step)
        self.ids = [each.event.id for each in found]
        return [
            (each.event.kind.value, each.event.worker, each.event.step, each.event.text)
            for each in found
        ]


def joined(incarnation: int) -> tuple[events.WorkerJoined, effects.AcceptJoin]:
    request = line_values.joining(
        incarnation=incarnation, node_id="alpha", devices=(events.Device("cuda", "NVIDIA L4"),)
    )
    accepted = line_values.accepted(step=3)
    return events.WorkerJoined(5, request), accepted


def assignment(key: Key, attempt: int) -> effects.Assignment:
    return line_values.assignment(key=key, roster=(0,), step=4, attempt=attempt)


def halt(number: int = 1) -> HaltEvidence:
    return HaltEvidence(
        id=number, reason=HaltReason.NON_FINITE_GRADIENT, step=4, worker=2, message="worker 2: nan"
    )


def test_the_first_event_says_that_the_service_began_or_goes_on() -> None:
    assert Telling().first == [("started", None, 3, "the run began")]
    assert Telling(resumed=True).first == [("started", None, 3, "the service goes on after step 3")]


def test_ids_go_on_where_the_journal_ended() -> None:
    telling = Telling()
    assert telling.ids == [7]

    telling.told(TICK, effects.NoteCheckpoint(0, 2, "step-2"), effects.NoteCheckpoint(0, 3, "x"))

    assert telling.ids == [8, 9]


def test_a_join_names_host_and_device_and_a_process_that_came_back() -> None:
    telling = Telling()

    assert telling.told(*joined(1)) == [("joined", 1, 3, "on alpha (NVIDIA L4)")]
    assert telling.told(*joined(1)) == [("joined", 1, 3, "again, on alpha (NVIDIA L4)")]
    assert telling.told(*joined(2)) == [("joined", 1, 3, "on alpha (NVIDIA L4)")]
    event, accepted = joined(3)
    assert telling.told(event, replace(accepted, credential="beta")) == [
        ("joined", 1, 3, "on alpha (NVIDIA L4), by the token of beta")
    ]


def test_a_process_that_was_here_before_the_service_came_again() -> None:
    event, accepted = joined(1)
    knows = replace(event, request=replace(event.request, greatest_term=9))

    told = Telling(resumed=True).told(knows, accepted)

    assert told == [("joined", 1, 3, "again, on alpha (NVIDIA L4)")]


def test_a_worker_that_was_suspected_by_mistake_is_told_of_as_it_comes_back() -> None:
    telling = Telling()
    telling.told(*joined(1))
    event, accepted = joined(1)

    told = telling.told(event, replace(accepted, mistaken_s=0.75))

    text = "again, on alpha (NVIDIA L4); it was suspected wrongly, and is back after 0.75 s"
    assert told == [("joined", 1, 3, text)]


LOST = effects.SaveDeparture(1, None, "silent for 3 s", 2, b"")
BACK = "went on after step 2, which {} brought: no worker held step 5"
TOLD: list[tuple[effects.Effect, tuple[str, int | None, int, str]]] = [
    (LOST, ("lost", 1, 2, "lost: silent for 3 s")),
    (effects.SaveDeparture(1, events.LeaveReason.COMPLETE, "", 2, b""), ("left", 1, 2, "complete")),
    (replace(LOST, dropped=True, message="by ann"), ("dropped", 1, 2, "dropped: by ann")),
    (effects.NoteCheckpoint(0, 2, "step-2"), ("checkpoint", 0, 2, "step-2")),
    (effects.NoteOverdue(3, None, 2), ("checkpoint_missed", None, 3, "the last one is of step 2")),
    (
        effects.NoteCaughtUp(2, 3.1, 0.02, learnt=True),
        ("caught_up", 2, 3, "learnt the line's state in 3.10 s; the line waited 0.02 s for it"),
    ),
    (
        effects.NoteCaughtUp(2, 3.1, 0.0, learnt=True),
        ("caught_up", 2, 3, "learnt the line's state in 3.10 s; the line did not wait for it"),
    ),
    (
        effects.NoteCaughtUp(2, 1.5, 1.5, learnt=False),
        ("caught_up", 2, 3, "got the line's state in 1.50 s, while the line waited"),
    ),
    (
        effects.SaveVerdict(step=4, key=Key(1, 2), worker=1, text="it was wrong", evidence="[]"),
        ("convicted", 1, 4, "it was wrong"),
    ),
    (effects.NoteWentBack(2, 5, (0,)), ("went_back", None, 2, BACK.format("worker 0"))),
    (effects.NoteWentBack(2, 5, (0, 1)), ("went_back", None, 2, BACK.format("workers 0 and 1"))),
]


@pytest.mark.parametrize(("done", "told"), TOLD)
def test_what_was_done_is_told_with_who_it_was_and_the_step(
    done: effects.Effect, told: tuple[str, int | None, int, str]
) -> None:
    assert Telling().told(TICK, done) == [told]


def test_an_attempt_says_what_voided_the_one_before_once_for_all_members() -> None:
    telling = Telling()
    first = effects.Assign(5, assignment(Key(1, 1), 0))
    again = assignment(Key(1, 2), 1)

    assert telling.told(TICK, first) == []
    voided = effects.SendVoided(5, Key(1, 1), "worker 1 was lost")
    assert telling.told(TICK, voided, effects.Assign(5, again), effects.Assign(6, again)) == [
        ("attempt", None, 4, "attempt 2: worker 1 was lost")
    ]


def test_a_halt_and_its_answer_belong_to_the_step_that_was_stopped() -> None:
    telling = Telling()
    answer = effects.SaveAnswer(1, HaltAnswer.DROP, 2, "ann")

    assert telling.told(TICK, effects.SaveHalt(halt())) == [
        ("halted", 2, 4, f"{HaltReason.NON_FINITE_GRADIENT.label}: worker 2: nan")
    ]
    assert telling.told(TICK, answer) == [("answered", 2, 4, "drop by ann")]
    assert Telling().told(TICK, answer) == [("answered", 2, 4, "drop by ann")]


def test_an_overflow_is_told_once_its_step_is_durable() -> None:
    telling = Telling()
    record = Record(Key(1, 2), None, RecordKind.STEP, 4, Cursor(0, 4), (0,))
    result = line_values.result(seconds=0.1, overflow=True)

    assert telling.told(TICK, effects.SaveRecord(record, result)) == []
    assert telling.told(events.RecordSaved(record.key)) == [
        ("overflow", None, 4, "scaled gradients overflowed, so no weight moved")
    ]
    telling.told(TICK, effects.SaveRecord(record, result))
    assert telling.told(events.JournalFailed("disk full")) == []
    assert telling.told(events.RecordSaved(record.key)) == []


def test_another_mean_is_told_once_its_first_step_is_durable() -> None:
    telling, told = Telling(), []

    for number, trimmed in enumerate((None, 1, 1, 0, 1), 4):
        record = Record(Key(1, number), None, RecordKind.STEP, number, Cursor(0, 4), (0,))
        result = line_values.result(seconds=0.1, trimmed=trimmed)
        told += telling.told(TICK, effects.SaveRecord(record, result))
        told += telling.told(events.RecordSaved(record.key))

    assert [(kind, step) for kind, _, step, _ in told] == [("mean", 5), ("mean", 7), ("mean", 8)]
    assert [text.partition(":")[0] for *_, text in told] == [
        *("the trimmed mean", "the weighted mean", "the trimmed mean"),
    ]


def test_the_end_is_told_once() -> None:
    telling = Telling()

    assert telling.told(TICK, state=LineState.COMPLETE, step=9) == [
        ("complete", None, 9, "after 9 steps")
    ]
    assert telling.told(TICK, state=LineState.COMPLETE, step=9) == []
