"""The ring's station: one rank's round and both its streams, owned by one thread.

Theory of operation. The stream to the next rank lives as long as rounds are committed and that rank
stays the next. A void round takes its streams with it, at both ends, so that nothing of its key is
ever added to another's. What arrives for a round that this rank was not assigned yet waits in
`_Arrivals`. Its sender is checked once the round is assigned: only this rank and the one before it
got the token of their link from the coordinator.
"""

from __future__ import annotations

import functools
import hmac
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from andon.protocol.messages import EnterRound, RingChunk
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.tcp.framing import Frame
from andon_trainer.core.events import AveragesComplete, ExchangeFailed
from andon_trainer.core.ring_landing import Arrived, Carrier, checked_own
from andon_trainer.core.ring_mean import Forward, RingEffect, RingViolation, Send
from andon_trainer.core.ring_round import RingRound
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.ring.incoming import Incoming, PassEnded, PassReceived
from andon_trainer.exchange.ring.link import RingLink, forwarded, framed

__all__ = ["RingStation"]


@dataclass(slots=True)
class _Arrivals:
    """What a stream brought and what was not used yet, since its round is not begun here."""

    key: Key | None = None
    """The round that its sender entered last."""
    early: deque[PassReceived] = field(default_factory=deque)
    over: str = ""
    """Why it ended; empty if it did not."""


class RingStation:
    """One rank's round and streams. Used by the ring's thread alone; outcomes go into the inbox."""

    def __init__(
        self,
        inbox: Inbox,
        connect: Callable[[str], RingLink],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Has no round and no streams.

        Args:
            inbox: where outcomes go.
            connect: opens a stream to the rank at an address.
            later: lets the ring's thread do something; for any thread.
        """
        self._inbox = inbox
        self._connect = connect
        self._later = later
        self.refused: Key | None = None
        """The last round for which this rank's own block held a bad value."""
        self.received_bytes = 0
        """The size of all headers and chunks so far."""
        self._round: RingRound | None = None
        self._greatest: Key | None = None
        self._link: RingLink | None = None
        self._entered: Incoming | None = None
        """The stream of the rank before, in the present round."""
        self._stashed_bytes = 0
        """The size of its messages whose room was not given back yet."""
        self._streams: dict[Incoming, _Arrivals] = {}

    def begin(self, round_: RingRound) -> None:
        """Begins an exchange, of the present round or of a new one."""
        assigned = round_.assigned
        again = self._round is not None and self._round.assigned.key == assigned.key
        if self._round is not None and not again and not self._round.complete:
            self.forget()  # Nothing may be received to, or sent from, the averages any more.
        self._round, self._greatest = round_, assigned.key
        if assigned.world_size > 1:
            if assigned.ring is None:
                self._fail("PROTOCOL", "the coordinator named no neighbours: this line is no ring")
                return
            if not again:
                self._enter(round_)
            elif self._link is None or not self._link.alive:
                self.lose("the stream to the next rank is gone")
                return
            elif self._entered is not None:
                self._entered.landings = round_.landings
        # Before what came early is used: that takes the headers of all ranks, this one's too.
        self._do(round_.begin())
        # The rank before may have been assigned the round earlier than this one.
        for stream in list(self._streams):
            self._drain(stream)

    def _enter(self, round_: RingRound) -> None:
        """Enters a new round at the next rank."""
        assigned = round_.assigned
        ring = assigned.ring
        assert ring is not None
        # The rank before has to prove itself again, in each round.
        self._leave()
        if self._link is None or not self._link.alive or self._link.address != ring.address:
            self._unlink()
            self._link = self._connect(ring.address)
        # Sent before the header: the next rank refuses a message of a round that its sender did not
        # enter.
        enter = EnterRound(
            key=assigned.key,
            rank=assigned.rank,
            world_size=assigned.world_size,
            token=ring.token,
        )
        self._link.send(functools.partial(framed, enter))

    def act(self, key: Key, act: Callable[[RingRound], list[RingEffect]]) -> None:
        """Gives something of this worker's to the present round, unless that is over."""
        if self._round is not None and self._round.assigned.key == key:
            self._do(act(self._round))
            # A block of this rank may be what received chunks waited for.
            self._give_back()

    def end(self, key: Key) -> None:
        """The round is void."""
        if self._round is not None and self._round.assigned.key == key:
            self.forget()

    def forget(self) -> None:
        """Ends the round and the streams that carried it.

        When this returns, no thread writes to the averages or reads them.
        """
        self._round = None
        # From here on nothing is sent from the averages, and after `fence` nothing is received to
        # them. `fence` wants a stream that is over, so `refuse` comes first.
        self._unlink()
        entered = self._entered
        self._leave()
        if entered is not None:
            entered.refuse(Reason.REJOIN_NEEDED, "the round is void")
            entered.fence()

    def _leave(self) -> None:
        """Forgets the stream of the rank before, until it proves itself again."""
        if self._entered is not None:
            self._entered.landings = None
        self._entered, self._stashed_bytes = None, 0

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def take(self, event: PassReceived | PassEnded) -> None:
        """Takes a message of a stream, or its end."""
        arrivals = self._streams.setdefault(event.stream, _Arrivals())
        if isinstance(event, PassEnded):
            arrivals.over = event.message
        else:
            arrivals.early.append(event)
        try:
            self._drain(event.stream)
        finally:
            # After what it brought was judged: an end decided there is the one its sender hears.
            if isinstance(event, PassEnded):
                event.stream.end()

    def _drain(self, stream: Incoming) -> None:
        """Uses what a stream brought, as far as its round is the present one."""
        arrivals = self._streams[stream]
        while arrivals.early and self._use(stream, arrivals, arrivals.early[0]):
            arrivals.early.popleft()
        # Its end counts only after all that came before it.
        if not arrivals.over:
            return
        if stream is not self._entered:
            del self._streams[stream]
        # A stream may end once this rank has all that the round brings it.
        elif self._round is not None and not (self._round.complete or arrivals.early):
            self.lose(arrivals.over)

    def _use(self, stream: Incoming, arrivals: _Arrivals, received: PassReceived) -> bool:
        """Uses one message; False if it has to wait for its round or exchange."""
        message, round_ = received.arrived.message, self._round
        if isinstance(message, EnterRound):
            arrivals.key = message.key
        elif arrivals.key is None or message.key != arrivals.key:
            self._blame(stream, "a message of a round that its sender did not enter")
            return True
        key = message.key
        # Rule 14: an older key is answered with the greatest one.
        if self._greatest is not None and key < self._greatest:
            stream.refuse_stale(self._greatest)
            return True
        if round_ is None or key != round_.assigned.key:
            if self._greatest is not None and key == self._greatest:
                # This rank has ended the round already: nothing will ever take the message.
                stream.refuse(Reason.REJOIN_NEEDED, "the round is void")
                return True
            return False
        if isinstance(message, EnterRound):
            self._admit(stream, message, round_)
            # After the stream was admitted: this wakes its reader, which then finds the larger
            # window.
            stream.free(received.arrived.size)
            return True
        if stream is not self._entered:
            return True  # Its stream was refused; what follows on it is dropped.
        if round_.complete and message.sequence != round_.call.sequence:
            return False  # The rank before is in the round's next exchange already.
        self._receive(stream, received.arrived, round_)
        return True

    def _admit(self, stream: Incoming, message: EnterRound, round_: RingRound) -> None:
        """Admits the rank before this one, and nobody else."""
        assigned = round_.assigned
        ring, before = assigned.ring, (assigned.rank - 1) % assigned.world_size
        # In constant time, so that a stranger can't find the token byte by byte.
        right = ring is not None and hmac.compare_digest(message.token, ring.expected_token)
        if not right or (message.rank, message.world_size) != (before, assigned.world_size):
            text = "this is not the token of this link in this round"
            stream.refuse(Reason.TOKEN, text)
            return
        if self._entered is not None and self._entered is not stream:
            self._blame(stream, "the rank before this one entered the round twice")
            return
        stream.admitted = True
        stream.landings = round_.landings
        self._entered = stream

    def _receive(self, stream: Incoming, arrived: Arrived, round_: RingRound) -> None:
        self._stashed_bytes += arrived.size
        self.received_bytes += arrived.size
        try:
            self._do(round_.receive(arrived))
        except RingViolation as violation:
            self._blame(stream, str(violation))
        self._give_back()

    def _give_back(self) -> None:
        """Gives back the room of all messages that do not wait for this rank's own blocks."""
        if self._round is not None and self._entered is not None:
            waiting = self._round.waiting_bytes
            self._entered.free(self._stashed_bytes - waiting)
            self._stashed_bytes = waiting

    def _blame(self, stream: Incoming, what: str) -> None:
        """The sender of a stream broke the protocol: ends the stream, or fails the round."""
        round_ = self._round
        if round_ is None or stream is not self._entered:
            stream.refuse(Reason.INVALID_MESSAGE, what)
            return
        # The stream is left open until the round ends. If it were ended now, the coordinator might
        # hear its sender first, which knows only that it lost a stream.
        before = (round_.assigned.rank - 1) % round_.assigned.world_size
        self._fail("PROTOCOL", f"it sent {what}", rank=before)

    def _do(self, effects: list[RingEffect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Forward():
                    if self._link is not None:
                        self._link.send(functools.partial(forwarded, effect.arrived))
                case AveragesComplete() | ExchangeFailed():
                    self._note(effect)
                    self._inbox.put(effect)

    def _send(self, send: Send) -> None:
        """Lets the link's thread make the frame, checksum and all: this thread has more to do."""
        round_ = self._round
        if self._link is None or round_ is None:
            return
        key, message, checksums = round_.assigned.key, send.message, round_.checked

        def make(carrier: Carrier) -> Frame | None:
            crc32c = send.crc32c
            if send.unchecked and isinstance(message, RingChunk):
                # On the link's thread. The fault is raised on the ring's, which owns the round.
                finite, crc32c = checked_own(message, checksums=checksums)
                if not finite:
                    self._later(lambda: self.act(key, lambda now: now.refuse(message.block)))
                    return None  # The link sends nothing more.
            return framed(message, carrier, checksums=checksums, crc32c=crc32c)

        self._link.send(make)

    def _note(self, outcome: AveragesComplete | ExchangeFailed) -> None:
        """Remembers that this rank's own block is to blame."""
        if isinstance(outcome, ExchangeFailed) and outcome.kind == "NON_FINITE_GRADIENT":
            round_ = self._round
            if round_ is not None and outcome.rank == round_.assigned.rank:
                self.refused = outcome.key

    def link_ended(self, link: RingLink, why: str, greatest: Key | None) -> None:
        """The stream to the next rank ended; with `greatest` because its round is too old there."""
        if link is not self._link:
            return  # An older link, whose end was queued before it was replaced.
        if greatest is None:
            self.lose(why)
        else:
            text = "the next rank has begun a greater key"
            self._fail("STALE_ROUND", text, greatest=greatest)

    def lose(self, why: str) -> None:
        """Fails the round: one of its streams is gone."""
        self._fail("DATA_STREAM_LOST", why)

    def _fail(
        self, kind: str, message: str, *, rank: int | None = None, greatest: Key | None = None
    ) -> None:
        """Fails the round: nothing more of it is sent, and the reason is reported once."""
        round_ = self._round
        if round_ is None or round_.failed:
            return
        round_.failed = True  # From here on it answers every message with nothing.
        key = round_.assigned.key
        self._inbox.put(
            ExchangeFailed(key=key, kind=kind, message=message, rank=rank, greatest=greatest)
        )
