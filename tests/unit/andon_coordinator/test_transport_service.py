"""Access: who may see a line, and who may halt it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from andon.host.worker_tokens import Withdrawn, make_worker_token
from andon.protocol.reasons import Reason
from andon.protocol.run_settings import RunPlan
from andon.testing import small_layout
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.transport.access_control import AccessControl
from andon_coordinator.transport.errors import LineError
from scenarios import line_values

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


def worker(name: str, expires_s: int = 0, run: bytes = RUN) -> bytes:
    return make_worker_token(run, name, expires_s)


def joining(access: AccessControl, token: bytes) -> JoinRequest:
    request = line_values.joining(
        run_id="r", layout=small_layout(), plan=RunPlan(global_batch=1, dataset_size=4), token=token
    )
    return access.admitted(request)


def test_a_workers_own_token_joins_by_its_name_and_looks_and_stops_nothing() -> None:
    access = AccessControl(run_id="r", run_token=RUN)
    token = worker("beta-2")

    joined = joining(access, token)

    assert (joined.token, joined.credential) == (RUN, "beta-2")
    access.check_viewer(bearing(token))
    with refused(Reason.OPERATOR_TOKEN, "single workers and of viewers stop no line"):
        access.check_operator(bearing(token))


@pytest.mark.parametrize(
    "token",
    [
        worker("beta", run=b"the token of another run"),
        worker("beta").replace(b".beta.", b".gamma."),
        worker("beta", 99).replace(b".99.", b".0."),
        b"andon-worker.beta.0.",
        b"andon-worker.be/ta.0." + 64 * b"0",
    ],
)
def test_a_worker_token_that_was_not_made_so_is_no_token(token: bytes) -> None:
    access = AccessControl(run_id="r", run_token=RUN)

    assert joining(access, token).credential == ""
    assert joining(access, token).token == token
    with refused(Reason.TOKEN):
        access.check_viewer(bearing(token))


def test_a_worker_token_opens_nothing_once_it_is_withdrawn_or_has_expired(tmp_path: Path) -> None:
    file = tmp_path / "withdrawn"
    file.write_text("alpha  # lost on a train\n")
    access = AccessControl(
        run_id="r", run_token=RUN, withdrawn=Withdrawn(file), wall=lambda: 1000.0
    )
    assert joining(access, worker("beta", 1001)).credential == "beta"

    with refused(Reason.TOKEN, "of beta has expired"):
        joining(access, worker("beta", 1000))
    with refused(Reason.TOKEN, "of alpha was withdrawn"):
        access.check_viewer(bearing(worker("alpha")))
    with file.open("a") as more:
        more.write("beta\n")
    with refused(Reason.TOKEN, "of beta was withdrawn"):
        joining(access, worker("beta", 1001))
    file.write_text("alpha beta\n")
    with refused(Reason.TOKEN, "of gamma was withdrawn: line 1 of .* is no name"):
        joining(access, worker("gamma"))
    file.unlink()
    with refused(Reason.TOKEN, "can't tell whether the token of gamma was withdrawn"):
        joining(access, worker("gamma"))


def test_the_viewers_token_lets_see_and_neither_join_nor_operate() -> None:
    access = AccessControl(run_id="r", run_token=RUN, viewer_token=b"the viewers' token")

    access.check_viewer(bearing(b"the viewers' token"))
    with refused(Reason.OPERATOR_TOKEN):
        access.check_operator(bearing(b"the viewers' token"))
    assert joining(access, b"the viewers' token").token != RUN
