"""Who holds the line up, and what it costs."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from andon_cli.client import LineStatus, StepTimes, WorkerStatus
from andon_cli.commands.top import TopPicture, WorkerCosts, top_json, top_lines
from andon_cli.drawing.watching import Watcher
from andon_cli.questions import TopConfig


def worker(number: int, wait_s: float, *, data_s: float = 0.0, host: str = "alpha") -> WorkerStatus:
    """A worker of steps of one second; what it does not wait it computes."""
    compute_s = 0.9 - wait_s
    return WorkerStatus(
        worker=number, rank=number, host=host, device="cpu", activity="computing", step=3,
        live=True, samples_per_second=10.0, waiting_ratio=wait_s, step_s=1.0,
        timings=StepTimes(
            compute_s=compute_s, exchange_s=0.2, wait_s=wait_s, data_s=data_s,
            busy_s=compute_s - data_s,
        ),
    )  # fmt: skip


def status(step: int, *workers: WorkerStatus) -> LineStatus:
    return LineStatus(
        run_id="7f3a", state="RUNNING", step=step, live=len(workers),
        participating=len(workers), workers=workers,
    )  # fmt: skip


SLOW = status(3, worker(0, 0.5), worker(1, 0.1, data_s=0.3, host="beta"), worker(2, 0.4))


def seen(*statuses: LineStatus) -> WorkerCosts:
    costs = WorkerCosts()
    for each in statuses:
        costs.note(each)
    return costs


def test_the_last_worker_of_a_step_costs_the_others_what_they_wait_for_it() -> None:
    costs = seen(SLOW)

    # The others wait 0.4 s and 0.3 s longer than the exchange takes, in a second each.
    assert costs.of(1).costs == pytest.approx(0.7 / 2)
    assert costs.of(1).late == 1.0
    assert costs.of(0).costs == costs.of(2).costs == 0.0


def test_the_parts_of_a_workers_time_add_up_to_all_of_it() -> None:
    cost = seen(SLOW).of(1)

    assert cost.compute == pytest.approx(0.5)
    assert cost.data == pytest.approx(0.3)
    assert cost.exchange == pytest.approx(0.1)
    assert cost.waits == pytest.approx(0.0)
    assert cost.compute + cost.data + cost.exchange + cost.waits + cost.other == pytest.approx(1.0)
    assert seen(SLOW).of(0).waits == pytest.approx(0.4)


def test_a_step_that_is_shown_twice_counts_once() -> None:
    costs = seen(SLOW, SLOW, replace(SLOW, step=4, workers=(worker(0, 0.1), worker(1, 0.5))))

    assert len(costs) == 2
    assert costs.of(0).late == costs.of(1).late == 0.5


def test_who_costs_most_comes_first_and_who_is_gone_last() -> None:
    gone = replace(worker(9, 0.0), live=False)
    ranked = seen(SLOW).ranked(replace(SLOW, workers=(gone, *SLOW.workers)))

    assert [each.worker for each, _ in ranked] == [1, 0, 2, 9]


def test_the_table_says_who_is_to_blame_in_a_sentence() -> None:
    lines = top_lines(SLOW, seen(SLOW))

    assert lines[:2] == [
        "run 7f3a  RUNNING  step 3  of the last step, 1.0s each",
        "worker 1 holds the line up: the others spend 35 % of their time waiting for it",
    ]
    assert lines[3].split()[:9] == ["1", "beta", "cpu", "35", "%", "100", "%", "50", "%"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (status(3, worker(0, 0.101), worker(1, 0.1)), "nobody holds the line up"),
        (status(3, worker(0, 0.1)), "one worker: nobody waits for anybody"),
        (
            LineStatus(run_id="x", state="FORMING", waiting_for="2 workers, 1 of them here"),
            "waiting for 2 workers, 1 of them here",
        ),
        (LineStatus(run_id="x", state="RUNNING"), "no step was seen yet"),
    ],
)
def test_a_line_that_nobody_holds_up_says_so(told: LineStatus, said: str) -> None:
    assert top_lines(told, seen(told))[1] == said


def test_json_has_the_same_in_the_same_order() -> None:
    told = json.loads(top_json(SLOW, seen(SLOW)))

    assert (told["run_id"], told["step"], told["holds_up"], told["steps_seen"]) == ("7f3a", 3, 1, 1)
    assert [each["worker"] for each in told["workers"]] == [1, 0, 2]
    assert told["workers"][0]["costs"] == pytest.approx(0.35)
    assert told["workers"][0]["device"] == "cpu"


def test_a_coordinator_that_sends_no_times_is_shown_without_shares() -> None:
    plain = status(3, replace(worker(0, 0.5), timings=None), replace(worker(1, 0.1), timings=None))

    assert top_lines(plain, seen(plain))[1] == "no step was seen yet"
    assert json.loads(top_json(plain, seen(plain)))["holds_up"] == 1


@pytest.mark.parametrize("width", [40, 60, 120])
def test_the_picture_fits_the_terminal(width: int) -> None:
    watcher = Watcher(TopConfig())
    watcher.take(SLOW)
    file = io.StringIO()

    Console(file=file, width=width, height=30, no_color=True, legacy_windows=False).print(
        TopPicture(watcher=watcher, costs=seen(SLOW), now=watcher.heard_at)
    )

    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("◐") and "35 %" in line for line in lines)
