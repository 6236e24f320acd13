"""Sessions: whose streams may be opened, by the tokens that the coordinator gave at the joins."""

from __future__ import annotations

from andon.protocol import tokens
from andon.protocol.reasons import Reason
from andon_reducer.transport.status import Refused

__all__ = ["Sessions"]


class Sessions:
    """Knows the newest join of each worker that came: a token of an older one opens nothing more.

    So what a dead process knew, or one that an operator dropped, is worth nothing once another has
    its slot.
    """

    def __init__(self, secret: bytes) -> None:
        """Tokens are made with `secret`, which the coordinator has, too."""
        self._secret = secret
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}

    def admit(self, run_id: str, worker: int, token: bytes) -> int:
        """Lets the worker open a stream, or a transfer.

        Returns:
            The term of the coordinator that gave the token.

        Raises:
            Refused: the token is not its, or is of an older join than one that was seen.
        """
        serial = tokens.session_serial(self._secret, run_id, worker, token)
        if serial is None:
            text = f"the session token is not worker {worker}'s: join again"
            raise Refused(Reason.TOKEN, text)
        newest = self._newest.get((run_id, worker))
        if newest is not None and serial < newest:
            text = f"worker {worker} joined again since this session token was made: join again"
            raise Refused(Reason.TOKEN, text)
        self._newest[run_id, worker] = serial
        return serial[0]
