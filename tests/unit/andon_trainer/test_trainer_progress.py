"""The progress bar: on the main worker's terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from andon_trainer import Line
from andon_trainer.fit.callbacks import Evaluation, Step
from andon_trainer.fit.progress import ProgressBar


class Elsewhere(Line):
    """A line whose main worker is another one."""

    @property
    def is_main(self) -> bool:
        return False


def shown(line: Line, *, terminal: bool, wanted: bool | None = None) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with ProgressBar(3, wanted=wanted, console=console) as bar:
        bar.on_start(line, nn.Identity())
        bar.on_evaluate(Evaluation(1, 0.5, {"accuracy": 0.75}))
        for number in (1, 2, 3):
            bar.on_step(Step(number, 1.25, 4000.0))
    return output.getvalue()


def test_the_bar_ends_full_with_the_latest_evaluation(line: Line) -> None:
    text = shown(line, terminal=True)

    assert "3/3" in text
    assert "loss 1.25  4 000 samples/s  [evaluated: loss 0.5, accuracy 0.75]" in text


@pytest.mark.parametrize(("terminal", "wanted"), [(False, None), (True, False)])
def test_without_a_terminal_or_if_it_is_not_wanted_nothing_is_shown(
    line: Line, terminal: bool, wanted: bool | None
) -> None:
    assert shown(line, terminal=terminal, wanted=wanted) == ""


def test_a_worker_that_is_not_the_main_one_shows_nothing() -> None:
    line = Elsewhere(device="cpu")

    assert shown(line, terminal=True) == ""
    line.close()


def test_an_exception_gives_the_terminal_back(line: Line) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True)

    bar = ProgressBar(None, wanted=None, console=console)
    bar.on_start(line, nn.Identity())

    def fail() -> None:
        with bar:
            bar.on_step(Step(1, 1.0, 1.0))
            raise RuntimeError("of the script")

    with pytest.raises(RuntimeError, match="of the script"):
        fail()

    assert output.getvalue().endswith("\x1b[?25h")  # the cursor is visible again
