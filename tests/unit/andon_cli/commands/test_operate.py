"""Operating: what is said once a halt is answered, and who is on record for it."""

from __future__ import annotations

import socket

import pytest

from andon.protocol.halts import HaltAnswer
from andon_cli.client import LineStatus
from andon_cli.commands.operate import drained_text, operator_name, resumed_text


@pytest.mark.parametrize(
    ("answer", "worker", "text"),
    [
        (HaltAnswer.RETRY, None, "resumed: step 131, attempt 1"),
        (HaltAnswer.SKIP, None,
         "resumed: step 131, with the next samples; its own are recorded as skipped"),
        (HaltAnswer.DROP, 0, "resumed: step 131, attempt 1, without worker 0"),
    ],
)  # fmt: skip
def test_an_answer_is_confirmed_with_the_step_that_goes_on(
    answer: HaltAnswer, worker: int | None, text: str
) -> None:
    assert resumed_text(131, 1, answer, worker) == text


def test_an_operator_is_a_user_at_a_host() -> None:
    user, _, host = operator_name().partition("@")

    assert user
    assert host == socket.gethostname()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (LineStatus(run_id="7f3a", state="DRAINING", step=139),
         "finishing step 140; checkpoint; workers leave"),
        (LineStatus(run_id="7f3a", state="DRAINING", step=3, stop_reason="drained"),
         "no step to finish after step 3; workers leave"),
        (LineStatus(run_id="7f3a", state="COMPLETE", step=9, stop_reason="steps"),
         "run 7f3a is over already, after step 9"),
    ],
)  # fmt: skip
def test_a_drain_says_what_is_finished_and_who_leaves(status: LineStatus, text: str) -> None:
    assert drained_text(status) == text
