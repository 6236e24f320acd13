"""Screen: what is shown where there is no terminal, and that a terminal has a bar."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import LineStatus
from andon_cli.screen import Screen, steps_to_show


def status(step: int, *, state: str = "RUNNING", **fields: object) -> LineStatus:
    return LineStatus(run_id="7f3a", state=state, step=step, **fields)  # type: ignore[arg-type]


def shown(*statuses: LineStatus, terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, highlight=False)
    with Screen(console, on_halt="wait") as screen:
        for second, each in enumerate(statuses):
            screen.show(each, float(second))
    return output.getvalue()


def test_without_a_terminal_each_step_gets_one_line() -> None:
    text = shown(*(status(step, total_steps=3, loss=0.5) for step in (0, 1, 1, 2, 2, 3)))

    assert text.splitlines() == [f"step {step}/3  loss 0.500" for step in (1, 2, 3)]


def test_a_halt_is_shown_once() -> None:
    halt = HaltEvidence(id=4, reason=HaltReason.OPERATOR, step=2)

    text = shown(*[status(1, state="HALTED", halt=halt)] * 3)

    assert text.count("HALTED") == 1


def test_a_halt_that_was_answered_is_shown_as_resumed() -> None:
    halt = HaltEvidence(id=4, reason=HaltReason.OPERATOR, step=2)

    text = shown(status(1, state="HALTED", halt=halt), status(1), status(2))

    assert text.splitlines()[-3:] == ["step 1", "resumed: step 2", "step 2"]


def test_what_a_line_waits_for_is_said_once_if_it_lasts() -> None:
    text = shown(
        *[status(0, state="FORMING", waiting_for="2 workers, 0 of them here")] * 4,
        status(0, state="FORMING", waiting_for="the journal"),
        *[status(0, state="FORMING", waiting_for="2 workers, 1 of them here")] * 2,
    )

    assert text.splitlines() == [
        "waiting for 2 workers, 0 of them here",
        "waiting for 2 workers, 1 of them here",
    ]


def test_a_terminal_has_a_bar_and_a_time_to_go() -> None:
    text = shown(*(status(step, total_steps=10) for step in (1, 2, 3)), terminal=True)

    assert "[######--------------]  eta 7.0s" in text


def test_a_long_line_of_a_worker_is_neither_wrapped_nor_cut() -> None:
    output = io.StringIO()
    screen = Screen(Console(file=output, width=20, highlight=False), on_halt="wait")

    screen.say("[worker 0] " + "x" * 100)

    assert output.getvalue() == "[worker 0] " + "x" * 100 + "\n"


def test_a_step_to_show_that_was_told_late_is_shown_late() -> None:
    text = shown(*(status(step, total_steps=1000) for step in (1, 9, 13, 14)))

    assert text.splitlines() == ["step    1/1000", "step   13/1000"]


@pytest.mark.parametrize(
    ("total", "lines"), [(20, 20), (200, 200), (201, 102), (1000, 101), (123456, 102), (None, 300)]
)
def test_a_long_run_shows_about_one_step_in_a_hundred(total: int | None, lines: int) -> None:
    steps = range(1, (total or 3000) + 1)

    assert sum(steps_to_show(step, total) for step in steps) == lines
