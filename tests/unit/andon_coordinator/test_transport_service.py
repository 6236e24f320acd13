"""Access: who may see a line, and who may halt it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from andon.protocol.reasons import Reason
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.service import AccessControl

RUN, OPERATOR = b"token of the run", b"token of operators"


@dataclass
class Call:
    """What a call brings with it."""

    shown: str | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC gives it."""
        return () if self.shown is None else (("authorization", self.shown),)


def refused(reason: Reason, match: str | None = None) -> pytest.RaisesExc[LineError]:
    """Expects that a call is refused for this reason."""
    return pytest.RaisesExc(LineError, match=match, check=lambda error: error.reason is reason)


def bearing(token: bytes) -> Call:
    return Call(f"Bearer {token.decode()}")


@pytest.mark.parametrize(
    "call", [Call(), Call(""), Call("Bearer "), bearing(b"another"), Call(RUN.decode())]
)
def test_a_call_without_a_token_of_the_line_may_neither_see_nor_operate(call: Call) -> None:
    access = AccessControl(run_id="r", run_token=RUN)

    with refused(Reason.TOKEN, r"the run's token.*--token-file"):
        access.check_viewer(call)
    with refused(Reason.TOKEN):
        access.check_operator(call)


def test_the_runs_token_suffices_for_everything_if_operators_have_none() -> None:
    access = AccessControl(run_id="r", run_token=RUN)

    access.check_viewer(bearing(RUN))
    access.check_operator(bearing(RUN))


def test_if_operators_have_a_token_the_runs_token_only_lets_see() -> None:
    access = AccessControl(run_id="r", run_token=RUN, operator_token=OPERATOR)

    access.check_viewer(bearing(RUN))
    access.check_viewer(bearing(OPERATOR))
    access.check_operator(bearing(OPERATOR))
    with refused(Reason.OPERATOR_TOKEN, r"operators have a token.*--operator-token-file"):
        access.check_operator(bearing(RUN))


def test_a_line_with_only_an_operators_token_lets_everybody_see() -> None:
    access = AccessControl(run_id="r", operator_token=OPERATOR)

    access.check_viewer(Call())
    with refused(Reason.OPERATOR_TOKEN):
        access.check_operator(Call())


def test_a_line_without_tokens_asks_for_none() -> None:
    AccessControl(run_id="r").check_viewer(Call())
    AccessControl(run_id="r").check_operator(bearing(b"whatever"))


def test_an_access_control_does_not_show_its_tokens() -> None:
    assert "token of" not in repr(AccessControl(run_id="r", run_token=RUN, operator_token=OPERATOR))


def test_a_call_that_names_another_run_is_told_so_once_its_token_is_right() -> None:
    access = AccessControl(run_id="r", run_token=RUN)

    access.check_viewer(bearing(RUN), "r")
    with refused(Reason.WRONG_RUN, "run r is served here, not s"):
        access.check_viewer(bearing(RUN), "s")
    with refused(Reason.WRONG_RUN):
        access.check_operator(bearing(RUN), "s")
    with refused(Reason.TOKEN):
        access.check_operator(Call(), "s")
