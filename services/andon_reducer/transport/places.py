"""Places: how many calls of one kind each worker may have at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from andon.protocol.reasons import Reason
from andon_reducer.transport.status import Refused

__all__ = ["Places"]


class Places:
    """Counts the calls of each worker of each run."""

    def __init__(self, most: int, what: str) -> None:
        """A worker may have `most` at once; `what` names them in errors."""
        self._most = most
        self._what = what
        self._taken: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def taken(self, run_id: str, worker: int) -> Iterator[None]:
        """Has a place while it is entered.

        Raises:
            Refused: the worker has no place left.
        """
        who = run_id, worker
        if self._taken[who] >= self._most:
            text = (
                f"worker {worker} has {self._most} {self._what} here, which is the limit: the "
                "operator may raise --max-streams-per-worker"
            )
            raise Refused(Reason.TOO_MANY_STREAMS, text)
        self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
