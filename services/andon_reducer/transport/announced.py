"""Announced: what the coordinator told this reducer of its run, and what follows from that.

Theory of operation. A session token says which worker somebody is, and no more. With it alone a
worker could void the round of others by a message of a greater key (rule 14), or take the place of
an end of a state transfer. So a coordinator announces each round and each transfer before a worker
hears of it, and revokes the sessions of a worker that was dropped.

The coordinator of this process announces by a plain call: what is not announced is not the line's,
and is refused at once. A coordinator elsewhere announces on the stream of the registration, and a
worker's message may overtake that. So what is not announced waits, for `patience_s` at most, in its
own call; nothing else notices. An older coordinator announces nothing: then every key and transfer
is served that comes with a session token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from andon.protocol.announcements import (
    Announcement,
    RoundOpening,
    Serial,
    Session,
    SessionsRevoked,
    TransferOpening,
)
from andon.protocol.limits import MAX_WORKERS
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon_reducer.core.effects import CallRefusal
from andon_reducer.transport.admission import CallRefused, SessionTokens

__all__ = ["Announced", "TransferEnd"]

_KEPT_TRANSFERS = 2 * MAX_WORKERS
"""A worker is an end of one transfer at a time; older ones are over."""

TransferEnd = Callable[[TransferOpening], Session]
"""The donor, or the joiner, of a transfer."""


@dataclass(slots=True)
class _Run:
    """What is announced of a run."""

    patience_s: float
    greatest: Key | None = None
    """Of the rounds that were opened."""
    transfers: dict[int, TransferOpening] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced at each announcement, so that no waiter can miss one."""

    def has_opened(self, key: Key) -> bool:
        """Whether a round of this key may have been opened."""
        return self.greatest is not None and key <= self.greatest

    def open(self, key: Key) -> None:
        """A round of this key was opened."""
        if not self.has_opened(key):
            self.greatest = key


class Announced:
    """Admits sessions, keys and ends of transfers; lives on the reducer's event loop."""

    def __init__(self, tokens: SessionTokens) -> None:
        """Checks session tokens by `tokens`; nothing is announced yet."""
        self._tokens = tokens
        self._runs: dict[str, _Run] = {}
        self._open: dict[tuple[str, int], dict[object, tuple[Serial, _Refuse]]] = {}
        """What each worker of each run has open: its session, and what ends it."""

    def follow(self, run_id: str, *, patience_s: float) -> None:
        """From now on this run's coordinator announces; what it did not, waits `patience_s`."""
        run = self._runs.get(run_id)
        if run is None:
            self._runs[run_id] = _Run(patience_s)
        else:
            run.patience_s = patience_s

    def unfollow(self, run_id: str) -> None:
        """This run's coordinator announces nothing: what comes with a session token is served."""
        # In this order: whoever waits looks again, and finds nothing to wait for any more.
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.changed.set()

    def take(self, run_id: str, announcement: Announcement) -> None:
        """The run's coordinator announces something."""
        match announcement:
            case RoundOpening(key):
                run = self._runs[run_id]
                run.open(key)
                self._note(run)
            case TransferOpening(transfer_id):
                run = self._runs[run_id]
                run.transfers[transfer_id] = announcement
                # A dictionary keeps the order in which keys came: the first is the oldest.
                if len(run.transfers) > _KEPT_TRANSFERS:
                    del run.transfers[next(iter(run.transfers))]
                self._note(run)
            case SessionsRevoked(least):
                # Before the calls are ended: a worker may try again at once, with the same token.
                self._tokens.revoke(run_id, least)
                self._end_below(run_id, least)

    @contextmanager
    def session(
        self, run_id: str, worker: int, token: bytes, refuse: Callable[[CallRefusal], None]
    ) -> Iterator[Session]:
        """What a worker opens, while it is open; `refuse` ends it when its session is revoked.

        Raises:
            CallRefused: the token is not its, or opens nothing any more.
        """
        serial = self._tokens.admit(run_id, worker, token)
        opened, it = self._open.setdefault((run_id, worker), {}), object()
        opened[it] = serial, refuse
        try:
            yield Session(worker, serial)
        finally:
            del opened[it]
            # Another session may have taken this dictionary out when it left, and a newer one have
            # put in its own.
            if not opened and self._open.get((run_id, worker)) is opened:
                del self._open[run_id, worker]

    def is_announced(self, run_id: str, key: Key) -> bool:
        """Whether messages of this key may be passed on now."""
        run = self._runs.get(run_id)
        return run is None or run.has_opened(key)

    async def round_of(self, run_id: str, key: Key) -> None:
        """Returns once messages of this key may be passed on.

        Raises:
            CallRefused: no round of this key, or of a greater one, is announced in time.
        """
        if await self._until(run_id, lambda run: run.has_opened(key)):
            return
        text = (
            f"the coordinator has opened no round with the key {key.term}/{key.round}, or with a "
            "greater one: send what belongs to an assignment"
        )
        raise CallRefused(Reason.INVALID_MESSAGE, text)

    async def end_of(
        self, run_id: str, transfer_id: int, caller: Session, named: TransferEnd
    ) -> None:
        """Returns once it is certain that the caller is the named end of a transfer.

        Raises:
            CallRefused: it is another worker, or another session of the worker; or no such transfer
                is announced in time.
        """
        if not await self._until(run_id, lambda run: transfer_id in run.transfers):
            text = f"the coordinator has begun no transfer {transfer_id}: wait for StateTransfer"
            raise CallRefused(Reason.TOKEN, text)
        run = self._runs.get(run_id)
        # Looked up again above: the coordinator may have registered anew during the wait.
        if run is not None and named(run.transfers[transfer_id]) != caller:
            text = (
                f"this end of transfer {transfer_id} is not for worker {caller.worker} in this "
                "session: the coordinator named another"
            )
            raise CallRefused(Reason.TOKEN, text)

    def transfer(self, run_id: str, transfer_id: int) -> TransferOpening | None:
        """What was announced of a transfer; None: nothing was."""
        run = self._runs.get(run_id)
        return None if run is None else run.transfers.get(transfer_id)

    async def _until(self, run_id: str, known: Callable[[_Run], bool]) -> bool:
        """Waits until something is known of a run; True too if nothing is announced of it."""
        loop, since = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while (run := self._runs.get(run_id)) is not None and not known(run):
            left_s = since + run.patience_s - loop.time()
            if left_s <= 0:
                return False
            try:
                # No await lies between the look at `known` and this, so no announcement is missed.
                async with asyncio.timeout(left_s):
                    await run.changed.wait()
            except TimeoutError:
                return False
        return True

    def _note(self, run: _Run) -> None:
        run.changed.set()
        run.changed = asyncio.Event()

    def _end_below(self, run_id: str, least: Session) -> None:
        refusal = CallRefusal(Reason.TOKEN, f"this session of worker {least.worker} was ended")
        # A copy: what is refused may leave at once.
        for serial, refuse in list(self._open.get((run_id, least.worker), {}).values()):
            if serial < least.serial:
                refuse(refusal)


_Refuse = Callable[[CallRefusal], None]
