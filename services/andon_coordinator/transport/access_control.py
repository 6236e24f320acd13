"""Access control: who may join the line, who may see it, and who may stop it, by their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from andon.host.run_token import AUTHORIZATION, BEARER_PREFIX, is_same_token
from andon.host.worker_tokens import Withdrawn, WithdrawnUnreadable, WorkerToken
from andon.protocol.reasons import Reason
from andon_coordinator.core.events import JoinRequest
from andon_coordinator.transport.errors import LineError

__all__ = ["AccessControl"]

Context = Any  # grpc.aio's context; the stubs of the generated servicer know the sync one, too.


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControl:
    """Judges the tokens of a line. An empty token is not asked for.

    | token | may join | may look | may stop the line |
    |---|---|---|---|
    | the run's | yes | yes | if the operators have none |
    | a worker's, derived from the run's | yes | yes | no |
    | the operators' | no | yes | yes |
    | the viewers' | no | yes | no |
    """

    run_id: str
    run_token: bytes = field(default=b"", repr=False)
    operator_token: bytes = field(default=b"", repr=False)
    viewer_token: bytes = field(default=b"", repr=False)
    withdrawn: Withdrawn | None = None
    """Names of worker tokens that open nothing any more; None: all do."""
    wall: Callable[[], float] = time.time

    def admitted(self, request: JoinRequest) -> JoinRequest:
        """A Join as the core judges it: a worker's own token counts as the run's, by its name.

        Raises:
            LineError: it is a worker token that has expired, or was withdrawn.
        """
        name = self._worker_of(request.token)
        # Any other token goes on as it is: the core refuses it before it looks at anything else.
        return replace(request, token=self.run_token, credential=name) if name else request

    def check_rank(self, shown: bytes, run_id: str) -> None:
        """Admits a process that asks to be a rank, with the run's token or a worker's own.

        Raises:
            LineError: it shows neither, or names another run.
        """
        right = not self.run_token or is_same_token(shown, self.run_token)
        if not (right or self._worker_of(shown)):
            text = (
                f"the run asks for its token, and the rank shows {'another' if shown else 'none'}: "
                "give it the line's file by ANDON_TOKEN_FILE"
            )
            raise LineError(Reason.TOKEN, text)
        self._check_run(run_id)

    def check_viewer(self, context: Context, run_id: str = "") -> None:
        """Admits a call with one of the tokens; any call if the run has no token.

        Raises:
            LineError: the call has none of them, or names another run.
        """
        self.check_looking(_token_of(context))
        self._check_run(run_id)

    def check_operator(self, context: Context, run_id: str = "") -> None:
        """Admits a call with the operators' token; with the run's token if they have none.

        Raises:
            LineError: the call lacks that token, or names another run.
        """
        self.check_operating(_token_of(context))
        self._check_run(run_id)

    def check_looking(self, shown: bytes) -> None:
        """Admits somebody who shows one of the tokens; anybody if the run has no token.

        Raises:
            LineError: it is none of them.
        """
        if self.run_token and not self.knows(shown):
            what = "shows another" if shown else "shows none"
            raise LineError(
                Reason.TOKEN,
                f"the line asks for the run's token, and the call {what}: pass --token-file with "
                "the line's file, or set ANDON_TOKEN_FILE",
            )

    def check_operating(self, shown: bytes) -> None:
        """Admits somebody who shows the operators' token; the run's token if they have none.

        Raises:
            LineError: it is not that token.
        """
        self.check_looking(shown)
        wanted = self.operator_token or self.run_token
        if wanted and not is_same_token(shown, wanted):
            if self.operator_token:
                text = (
                    "this line's operators have a token, and the call does not show it: pass "
                    "--operator-token-file, or ask an operator"
                )
            else:
                text = (
                    "the tokens of single workers and of viewers stop no line: pass --token-file "
                    "with the run's token, or ask an operator"
                )
            raise LineError(Reason.OPERATOR_TOKEN, text)

    def _check_run(self, run_id: str) -> None:
        if run_id not in ("", self.run_id):
            text = f"run {self.run_id} is served here, not {run_id}"
            raise LineError(Reason.WRONG_RUN, text)

    def knows(self, shown: bytes) -> bool:
        """Whether it is one of the line's tokens.

        Raises:
            LineError: it is a worker token that has expired, or was withdrawn.
        """
        # All are compared before any result counts, so that the duration does not show which one
        # matched.
        known = (self.run_token, self.operator_token, self.viewer_token)
        right = [is_same_token(shown, each) for each in known]
        return any(right) or bool(self._worker_of(shown))

    def _worker_of(self, shown: bytes) -> str:
        """The name of a worker token; empty if it is none of this run's.

        Raises:
            LineError: it has expired, or was withdrawn.
        """
        token = WorkerToken.read(self.run_token, shown) if self.run_token else None
        if token is None:
            return ""
        remedy = "ask the line's operator for another one (`andon token`)"
        # The token is genuine by now, so its name may be said.
        if token.expires_s and self.wall() >= token.expires_s:
            text = f"the token of {token.name} has expired: {remedy}"
            raise LineError(Reason.TOKEN, text)
        try:
            withdrawn = self.withdrawn is not None and self.withdrawn.has(token.name)
        except WithdrawnUnreadable as error:
            # Nobody is let in who may have been withdrawn.
            text = f"the line can't tell whether the token of {token.name} was withdrawn: {error}"
            raise LineError(Reason.TOKEN, text) from None
        if withdrawn:
            raise LineError(Reason.TOKEN, f"the token of {token.name} was withdrawn: {remedy}")
        return token.name


def _token_of(context: Context) -> bytes:
    """The token that a call shows; empty if it shows none."""
    for name, value in context.invocation_metadata() or ():
        if name == AUTHORIZATION and isinstance(value, str) and value.startswith(BEARER_PREFIX):
            return value[len(BEARER_PREFIX) :].encode()
    return b""
