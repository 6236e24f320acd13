"""Screen: what is shown where there is no terminal, and that a terminal has a board."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from andon.protocol.halts import HaltEvidence, HaltReason
from andon_cli.client import LineStatus
from andon_cli.drawing.screen import Screen, steps_to_show


def status(step: int, *, state: str = "RUNNING", **fields: object) -> LineStatus:
    return LineStatus(run_id="7f3a", state=state, step=step, **fields)  # type: ignore[arg-type]


class Terminal(io.StringIO):
    """A terminal, as far as a console asks."""

    def isatty(self) -> bool:
        return True


def screen_on(file: io.StringIO, width: int = 200, **settings: Any) -> Screen:
    environment = {"TERM": settings.pop("term", "xterm"), "NO_COLOR": "1"}
    console = Console(
        file=file, width=width, height=24, highlight=False, _environ=environment,
        force_terminal=settings.pop("force_terminal", None),
    )  # fmt: skip
    return Screen(console, on_halt="wait", **settings)


def shown(*statuses: LineStatus, terminal: bool = False) -> str:
    output = Terminal() if terminal else io.StringIO()
    with screen_on(output) as screen:
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


def test_a_terminal_has_a_board_with_a_time_to_go() -> None:
    text = shown(*(status(step, total_steps=10) for step in (1, 2, 3)), terminal=True)

    assert "]   30 %  step  3/10  eta 7.0s" in text


@pytest.mark.parametrize(
    ("output", "settings"),
    [(Terminal(), {"term": "dumb"}), (io.StringIO(), {"force_terminal": True})],
    ids=["a terminal that can't move its cursor", "a file that gets colours"],
)
def test_where_no_board_can_be_drawn_there_is_a_line_for_each_step(
    output: io.StringIO, settings: dict[str, Any]
) -> None:
    with screen_on(output, **settings) as screen:
        screen.show(status(1), 0.0)
        screen.show(status(2), 1.0)

    assert output.getvalue().splitlines() == ["step 1", "step 2"]


def test_the_board_is_drawn_a_few_times_a_second_at_most() -> None:
    output = Terminal()

    with screen_on(output) as screen:
        for step in range(1, 101):
            screen.show(status(step), step / 100)

    assert output.getvalue().count("step ") <= 7


def test_a_halt_stays_on_the_board_rings_the_bell_and_is_said_above_it() -> None:
    halt = HaltEvidence(id=4, reason=HaltReason.OPERATOR, step=2)

    text = shown(*[status(1, state="HALTED", halt=halt)] * 3, terminal=True)

    assert text.count("\a") == 1
    assert text.count("No weight moved.") == 1
    assert "HALTED at step 2, 2.0s ago. Answer: andon resume" in text


def test_the_board_shows_the_last_line_of_each_worker_and_says_warnings_above_it() -> None:
    output = Terminal()

    with screen_on(output) as screen:
        screen.entitle("run 7f3a")
        screen.keep_output_in("runs/7f3a/worker-N.log")
        for slot in (0, 1):
            hear = screen.hear(slot)
            for line in ("first", f"WARNING: slot {slot} is \x1b[2Jslow", f"last of {slot}"):
                hear(line)
        screen.draw(1.0)

    text = output.getvalue()
    assert "first" not in text
    assert text.count("[worker 0] WARNING: slot 0 is slow") == 1
    assert "slot 1 is slow" not in text
    for line in ("worker 0  last of 0", "worker 1  last of 1", "all output: runs/7f3a/"):
        assert line in text


def test_after_an_answer_no_worker_says_any_more_that_it_waits_for_the_operator() -> None:
    halt = HaltEvidence(id=4, reason=HaltReason.OPERATOR, step=2)
    output = Terminal()

    with screen_on(output) as screen:
        hear = screen.hear(0)
        screen.show(status(1, state="HALTED", halt=halt), 0.0)
        hear("HALTED at step 2. Waiting for the operator.")
        screen.show(status(1), 1.0)

    board = output.getvalue().rpartition("\x1b[2K")[2]  # what was drawn last
    assert "worker 0" in board
    assert "Waiting for the operator" not in board


def test_without_a_terminal_all_output_is_shown_unless_another_choice_was_made() -> None:
    texts = []
    for mode in (None, "last", "off"):
        output = io.StringIO()
        screen = screen_on(output, output=mode)
        for line in ("first", "WARNING: slow", "the data is not here"):
            screen.hear(0)(line)
        screen.worker_ended(0, failed=True)
        texts.append([line.removeprefix("[worker 0] ") for line in output.getvalue().splitlines()])

    assert texts == [
        ["first", "WARNING: slow", "the data is not here"],
        ["WARNING: slow", "first", "the data is not here"],
        ["first", "WARNING: slow", "the data is not here"],
    ]


def test_a_terminal_that_became_narrower_is_cleared_of_lines_that_it_wrapped() -> None:
    output = Terminal()
    screen = screen_on(output, width=100)
    with screen:
        screen.entitle("x" * 90)
        screen.draw(1.0)
        before = len(output.getvalue())
        screen._console.width = 40
        screen.say("said")

    # Three rows of 40 cells for a line of 90: one row is the line itself.
    said = output.getvalue()[before:]
    assert said.startswith("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\r\x1b[2K")


def test_a_long_line_of_a_worker_is_neither_wrapped_nor_cut() -> None:
    output = io.StringIO()
    screen = screen_on(output, width=20)

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
