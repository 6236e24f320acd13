"""The guard: who may look at the line, and who may stop it, by the token that a call shows and the
run that it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from andon.host.run_token import AUTHORIZATION, BEARER_PREFIX, is_same_token
from andon_coordinator.transport.errors import OperatorTokenWrong, TokenWrong, WrongRun

__all__ = ["Guard"]

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The line's run, and its tokens; an empty one asks for nothing."""

    run_id: str
    run_token: bytes = field(default=b"", repr=False)
    operator_token: bytes = field(default=b"", repr=False)

    def let_look(self, context: Context, run_id: str = "") -> None:
        """Lets whoever shows one of the tokens see the line; anybody if the run has none.

        Raises:
            TokenWrong: the call shows neither.
            WrongRun: it names another run than the one that is served here.
        """
        self._known(context)
        self._same_run(run_id)

    def let_operate(self, context: Context, run_id: str = "") -> None:
        """Lets operators halt, resume and drain: whoever has the run's token if they have none.

        Raises:
            OperatorTokenWrong: the operators have a token, and the call does not show it.
            TokenWrong: the call shows no token of this line.
            WrongRun: it names another run than the one that is served here.
        """
        shown = self._known(context)
        if self.operator_token and not is_same_token(shown, self.operator_token):
            raise OperatorTokenWrong(
                "this line's operators have a token, and the call does not show it: pass "
                "--operator-token-file, or ask an operator"
            )
        self._same_run(run_id)

    def _known(self, context: Context) -> bytes:
        shown = _shown(context)
        right = [is_same_token(shown, self.run_token), is_same_token(shown, self.operator_token)]
        if self.run_token and not any(right):
            what = "shows another" if shown else "shows none"
            raise TokenWrong(
                f"the line asks for the run's token, and the call {what}: pass --token-file with "
                "the line's file, or set ANDON_TOKEN_FILE"
            )
        return shown

    def _same_run(self, run_id: str) -> None:
        if run_id not in ("", self.run_id):
            raise WrongRun(f"run {self.run_id} is served here, not {run_id}")


def _shown(context: Context) -> bytes:
    """The token that a call shows; empty if it shows none."""
    for name, value in context.invocation_metadata() or ():
        if name == AUTHORIZATION and isinstance(value, str) and value.startswith(BEARER_PREFIX):
            return value[len(BEARER_PREFIX) :].encode()
    return b""
