"""Tickets: how the processes of a launch ask rank 0 where the line is, by way of their store.

Theory of operation. A store outlives the processes that write to it: torchrun's agents keep it
while they start their processes again. So an address that is found there may be that of a service
which is gone, and nothing in the environment tells one start from the next: each host counts
`TORCHELASTIC_RESTART_COUNT` for itself, and leaves membership changes out. So nobody reads what was
written before. Each process draws a ticket, a number that the store gives out once, and waits for
the answer to that ticket. Only a rank 0 that lives can give it, and it lives as long as the service
that it started. It answers every ticket for as long as it runs: under a static rendezvous a host
may start its processes again while the others go on. Only that a run is over stays in the store,
for a host that comes too late: that never changes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from andon_trainer.errors import LineLost

__all__ = ["Answering", "Store", "ask", "tell_late"]

_POLL_S = 0.1


class Store(Protocol):
    """What is used of a store of `torch.distributed`. Every call may raise RuntimeError."""

    def set(self, key: str, value: str, /) -> None:
        """Keeps a value."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, which is 0 at first; the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


class Answering:
    """Rank 0's part: answers all tickets, from a thread of its own, until it is closed."""

    def __init__(self, store: Store, prefix: str, answer: Mapping[str, Any]) -> None:
        """Begins to answer. Nothing else may use `store` until this is closed.

        Args:
            store: where tickets are drawn.
            prefix: of the keys.
            answer: what everybody gets; JSON.
        """
        self._store, self._prefix = store, prefix
        self._answer = json.dumps(answer)
        # An earlier rank 0 may still run though its agent is gone: it falls silent.
        self._number = store.add(f"{prefix}/answering", 1)
        self._first = store.add(f"{prefix}/tickets", 0)
        self._answered = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="andon-launch", daemon=True)
        self._thread.start()

    def await_tickets(self, count: int, most_s: float) -> None:
        """Waits until `count` tickets that were drawn since it began are answered, or so long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._answered >= self._first + count, most_s
            )

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        # A store that is gone has nobody left who could ask.
        with suppress(RuntimeError):
            while self._answer_all():
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, _POLL_S):
                        return
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _answer_all(self) -> bool:
        """Answers what was drawn since; False if another rank 0 does from now on."""
        if self._store.add(f"{self._prefix}/answering", 0) != self._number:
            return False
        drawn = self._store.add(f"{self._prefix}/tickets", 0)
        # Tickets of earlier starts too: one of them may be of a process that waits for us.
        for ticket in range(self._answered + 1, drawn + 1):
            self._store.set(f"{self._prefix}/answer/{ticket}", self._answer)
        with self._changed:
            self._answered = drawn
            self._changed.notify_all()
        return True


def tell_late(store: Store, prefix: str, answer: Mapping[str, Any]) -> None:
    """Leaves the answer to all tickets that no rank 0 will answer any more."""
    store.set(_late(prefix), json.dumps(answer))


def _late(prefix: str) -> str:
    return f"{prefix}/late"


def ask(store: Store, prefix: str, most_s: float) -> dict[str, Any]:
    """Draws a ticket, and waits for rank 0's answer.

    Raises:
        LineLost: rank 0 did not answer for `most_s`.
        RuntimeError: the store is gone.
    """
    ticket = store.add(f"{prefix}/tickets", 1)
    key = f"{prefix}/answer/{ticket}"
    deadline = time.monotonic() + most_s
    while not store.check([key]):
        if store.check([_late(prefix)]):
            key = _late(prefix)
            break
        if time.monotonic() > deadline:
            raise LineLost(
                f"rank 0 of this launch did not call line.prepare for {most_s:.0f} s, and it "
                "serves the line: see what it does, or start the service by itself (`andon serve`) "
                "and set ANDON_ADDRESS",
                address="",
                last_step=0,
            )
        time.sleep(_POLL_S)
    answer: dict[str, Any] = json.loads(store.get(key))
    return answer
