"""What the board of a run shows, and that it fits the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import LineStatus
from andon_cli.drawing.progress import Pace, RunView, board_lines

STATUS = LineStatus(
    run_id="7f3a",
    state="RUNNING",
    step=118,
    total_steps=1000,
    loss=2.4128,
    samples_per_second=1204.2,
    exchange_s=0.006,
    hidden_ratio=0.81,
)
VIEW = RunView(
    title="run 7f3a  http://127.0.0.1:9400/",
    devices="2 workers on cpu (1 thread each)",
    status=STATUS,
    eta_s=72.2,
    workers=[("worker 0", "epoch 3"), ("worker 1", "epoch 4")],
    logs="runs/7f3a/worker-N.log",
)
HALT = HaltEvidence(id=4, reason=HaltReason.NON_FINITE_GRADIENT, step=119, worker=1)


def text_of(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in board_lines(view, width, height)]


def test_the_board_of_a_running_line_fits_eighty_columns() -> None:
    assert text_of(VIEW) == [
        "run 7f3a  http://127.0.0.1:9400/  RUNNING  2 workers on cpu (1 thread each)",
        "[####------------------------------------]   11 %  step  118/1000  eta 1m12s",
        "loss 2.413  1 204 samples/s  exchange 6.0 ms (81 % hidden)",
        "worker 0  epoch 3",
        "worker 1  epoch 4",
        "all output: runs/7f3a/worker-N.log",
    ]


def test_the_bar_keeps_its_length_when_the_time_to_go_has_fewer_digits() -> None:
    bars = {
        text_of(replace(VIEW, eta_s=eta_s), width=70)[1].index("]")
        for eta_s in (7.0, 58.0, 599.0, 7200.0, None)
    }

    assert len(bars) == 1


@pytest.mark.parametrize("width", [1, 5, 20, 40, 79, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 8, 24])
def test_no_line_is_longer_than_the_terminal_and_there_is_room_below(
    width: int, height: int
) -> None:
    wide = [(f"worker {slot}", "漢字" * 200) for slot in range(64)]

    lines = board_lines(replace(VIEW, workers=wide), width, height)

    assert len(lines) <= max(height - 1, 1)
    assert all(cell_len(line.plain) <= width for line in lines)


def test_of_many_workers_as_many_are_shown_as_half_the_terminal_holds() -> None:
    many = [(f"worker {slot}", "x") for slot in range(64)]

    lines = text_of(replace(VIEW, workers=many))

    assert len(lines) == 3 + 12
    assert lines[-2].split() == ["worker", "10", "x"]
    assert lines[-1] == "53 more workers; all output: runs/7f3a/worker-N.log"


def test_a_halt_takes_the_place_of_the_figures_and_names_the_answers() -> None:
    view = replace(VIEW, status=replace(STATUS, state="HALTED", halt=HALT), halted_s=75.0)

    lines = text_of(view)

    assert "HALTED  2 workers" in lines[0]
    assert lines[2] == (" HALTED at step 119, 1m15s ago. Answer: andon resume [--skip | --drop 1] ")


def test_a_halt_that_nobody_can_answer_says_what_the_workers_do() -> None:
    view = replace(VIEW, status=replace(STATUS, state="HALTED", halt=HALT), waits=False)

    assert text_of(view)[2] == " HALTED at step 119, 0.0s ago: the workers raise LineHalted "


def test_a_line_that_forms_says_what_it_waits_for() -> None:
    waiting = LineStatus(
        run_id="7f3a", state="FORMING", waiting_for="2 workers, 1 of them here", total_steps=10
    )

    lines = text_of(replace(VIEW, status=waiting, devices="", eta_s=None))

    assert lines[0].endswith("FORMING")
    assert lines[2] == "waiting for 2 workers, 1 of them here"


def test_what_stays_of_the_board_says_nothing_that_is_true_of_a_moment_only() -> None:
    halted = replace(STATUS, state="HALTED", halt=HALT)

    lines = text_of(replace(VIEW, status=halted, over=True))

    assert not any("HALTED" in line or "eta" in line for line in lines)


def test_before_the_first_status_the_board_says_that_something_starts() -> None:
    assert text_of(RunView()) == ["starting the service"]


def after(*seen: tuple[float, int, str], total: int = 10) -> float | None:
    pace = Pace()
    status = STATUS
    for now, step, state in seen:
        status = replace(STATUS, step=step, state=state, total_steps=total)
        pace.note(status, now)
    return pace.eta_s(status)


SLOW = [(10.0 * step, step, "RUNNING") for step in range(1, 100)]
FAST = [(990.0 + number, 99 + 10 * number, "RUNNING") for number in range(1, 62)]
PACES: dict[str, tuple[list[tuple[float, int, str]], int, float | None]] = {
    "that of its steps": ([(float(n), n + 1, "RUNNING") for n in range(3)], 10, 7.0),
    "without the time of a halt": (
        [(0.0, 1, "RUNNING"), (2.0, 3, "RUNNING"), (2.0, 3, "HALTED"), (3600.0, 3, "HALTED"),
         (3600.0, 3, "RUNNING"), (3602.0, 5, "RUNNING")], 10, 5.0,
    ),
    "a new one after a roll back": (
        [(0.0, 1, "RUNNING"), (5.0, 9, "RUNNING"), (6.0, 2, "RUNNING")], 10, None,
    ),
    "without that of an hour ago": ([*SLOW, *FAST], 809, 10.0),
    "of steps of minutes": (
        [(float(second), second // 300 + 1, "RUNNING") for second in range(900)], 10, 7 * 450,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "total", "eta_s"), PACES.values(), ids=PACES)
def test_the_time_to_go_follows_from_the_pace(
    seen: list[tuple[float, int, str]], total: int, eta_s: float | None
) -> None:
    found = after(*seen, total=total)

    assert found == (eta_s if eta_s is None else pytest.approx(eta_s, rel=0.01))
