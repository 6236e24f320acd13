"""The guard: who may look at a line, and who may stop it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from andon_coordinator.transport.errors import OperatorTokenWrong, TokenWrong, WrongRun
from andon_coordinator.transport.guard import Guard

RUN, OPERATOR = b"token of the run", b"token of operators"


@dataclass
class Call:
    """What a call brings with it."""

    shown: str | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC gives it."""
        return () if self.shown is None else (("authorization", self.shown),)


def bearing(token: bytes) -> Call:
    return Call(f"Bearer {token.decode()}")


@pytest.mark.parametrize(
    "call", [Call(), Call(""), Call("Bearer "), bearing(b"another"), Call(RUN.decode())]
)
def test_a_call_that_shows_no_token_of_the_line_neither_looks_nor_operates(call: Call) -> None:
    guard = Guard(run_id="r", run_token=RUN)

    with pytest.raises(TokenWrong, match=r"the run's token.*--token-file"):
        guard.let_look(call)
    with pytest.raises(TokenWrong):
        guard.let_operate(call)


def test_the_runs_token_does_for_everything_while_operators_have_none() -> None:
    guard = Guard(run_id="r", run_token=RUN)

    guard.let_look(bearing(RUN))
    guard.let_operate(bearing(RUN))


def test_where_operators_have_a_token_the_runs_only_looks() -> None:
    guard = Guard(run_id="r", run_token=RUN, operator_token=OPERATOR)

    guard.let_look(bearing(RUN))
    guard.let_look(bearing(OPERATOR))
    guard.let_operate(bearing(OPERATOR))
    with pytest.raises(OperatorTokenWrong, match=r"operators have a token.*--operator-token-file"):
        guard.let_operate(bearing(RUN))


def test_a_line_with_an_operators_token_alone_lets_everybody_look() -> None:
    guard = Guard(run_id="r", operator_token=OPERATOR)

    guard.let_look(Call())
    with pytest.raises(OperatorTokenWrong):
        guard.let_operate(Call())


def test_a_line_without_tokens_asks_for_none() -> None:
    Guard(run_id="r").let_look(Call())
    Guard(run_id="r").let_operate(bearing(b"whatever"))


def test_a_guard_does_not_show_its_tokens() -> None:
    assert "token of" not in repr(Guard(run_id="r", run_token=RUN, operator_token=OPERATOR))


def test_a_call_that_names_another_run_is_told_so_once_its_token_is_right() -> None:
    guard = Guard(run_id="r", run_token=RUN)

    guard.let_look(bearing(RUN), "r")
    with pytest.raises(WrongRun, match="run r is served here, not s"):
        guard.let_look(bearing(RUN), "s")
    with pytest.raises(WrongRun):
        guard.let_operate(bearing(RUN), "s")
    with pytest.raises(TokenWrong):
        guard.let_operate(Call(), "s")
