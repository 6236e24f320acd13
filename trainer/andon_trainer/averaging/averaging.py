"""Averaging: the exchanges of a round, each of which is opened, filled and finished.

Whatever a worker gives to the others goes through here: gradients while backward runs, the change
of a window, a script's own calls, and the buffers and numbers that follow them in the same round.
Workers pair their exchanges by a number that counts them, so one object counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon_trainer.averaging.feedback import ErrorFeedback, FeedbackMember
from andon_trainer.averaging.norms import l2_norm
from andon_trainer.core.calls import Call, Floats, NodePart, mean_of_gradients
from andon_trainer.core.events import AveragesComplete
from andon_trainer.core.reports import Timings
from andon_trainer.exchange.path import Exchange

__all__ = ["Averaged", "Averages", "Averaging", "AveragingMember", "OpenExchange"]

_GRADIENTS = "line.backward"


class AveragingMember(FeedbackMember, Protocol):
    """What averaging asks of a worker's place on the line."""

    def begin(self, weight: float, call: Call | None = None) -> bool:
        """Begins an exchange of the round; False if the round is void."""

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        """Waits for its averages; None if the round is void."""

    def hold(self) -> bool:
        """Notes that no exchange of the round is missing; False if it is void."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The result of one averaging; `p.grad` is the mean."""

    total_weight: float
    """Sum of all workers' weights."""
    world_size: int
    timings: Timings
    """Of this averaging: `exchange_s` and `wait_s`."""
    gradient_norm: float | None = None
    """L2 norm of all averages together; None if the line does not ask for it."""
    own_gradient_norm: float | None = None
    """That of this worker's contribution, before it was limited; None if it made none."""
    block_norms: tuple[float, ...] = ()
    """Likewise of each block of the layout; empty if they are not known."""
    computed_at: float = 0.0
    """When the last backward was over, by `time.perf_counter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """What came of an exchange. Times are by `time.perf_counter`."""

    blocks: Sequence[Floats]
    """Of all blocks of the layout; those that were not exchanged hold anything.

    Valid until the next exchange of the round is opened, which may use the memory again.
    """
    total_weight: float
    world_size: int
    sent_at: float
    """When the first block left, or `filled_at` if this worker gave nothing."""
    filled_at: float
    """When this worker had given all, and began to wait."""
    came_at: float
    """When the averages were here."""

    def averaged(
        self,
        norm: float | None,
        own_norm: float | None = None,
        *,
        more_s: float = 0.0,
    ) -> Averaged:
        """The result, as the line is told of it; `more_s`: what exchanges after this one took."""
        done = self.came_at + more_s
        return Averaged(
            self.total_weight,
            self.world_size,
            Timings(exchange_s=done - self.sent_at, wait_s=done - self.filled_at),
            gradient_norm=norm,
            own_gradient_norm=own_norm,
            computed_at=self.filled_at,
        )


class OpenExchange:
    """An exchange that was opened, and is not finished."""

    def __init__(
        self, member: AveragingMember, exchange: Exchange, feedback: ErrorFeedback, *, gives: bool
    ) -> None:
        """`exchange` is the one that was begun."""
        self.gives = gives
        """Whether the others wait for this worker's blocks."""
        self.exchange = exchange
        self._member = member
        self._feedback = feedback

    def submit(self, block: int, flat: Floats) -> None:
        """Gives a block of gradients, with what the encoding lost of it before.

        `flat` must not change until the exchange is finished.
        """
        self._feedback.submit(block, flat)

    def submit_numbers(self, block: int, flat: Floats) -> None:
        """Gives a block of numbers that are no gradients: nothing was lost of them before."""
        self.exchange.submit(block, flat)

    def submit_nodes(self, block: int, flats: Sequence[Floats]) -> None:
        """Gives a block's sums, one for each of the call's nodes, in float32."""
        self.exchange.submit_nodes(block, flats)

    def finish(self, *, last: bool) -> Averages | None:
        """Waits for the averages; `last`: no other exchange of the round follows.

        Returns:
            None if the round is void.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
        filled = time.perf_counter()
        complete = self._member.await_averages(last=last)
        if complete is None:
            return None
        first = self.exchange.first_sent
        return Averages(
            # Asked for after the wait: if all abstained, zeros have taken the place of shared
            # averages.
            blocks=self.exchange.averages,
            total_weight=complete.total_weight,
            world_size=complete.world_size,
            sent_at=filled if first is None else first,
            filled_at=filled,
            came_at=time.perf_counter(),
        )


class Averaging:
    """One worker's exchanges, round after round. Used by one thread.

    In each round every worker opens the same exchanges in the same order.
    """

    def __init__(self, member: AveragingMember, layout: Layout) -> None:
        """Opens nothing yet."""
        self.member = member
        self.sizes = [block.elements for block in layout.blocks]
        """Elements of each block."""
        self._feedback = ErrorFeedback(member, layout)
        self._round: Key | None = None
        self._opened = 0
        """Exchanges of that round that were opened: the number of the next one."""

    @property
    def alone(self) -> bool:
        """Whether nobody else takes averages of the present round."""
        assigned = self.member.position.assigned
        return assigned is None or assigned.alone

    @property
    def rank(self) -> int:
        """This worker's rank in the present round."""
        assigned = self.member.position.assigned
        assert assigned is not None
        return assigned.rank

    def open(
        self, weight: float, call: Call | None = None, nodes: tuple[NodePart, ...] = ()
    ) -> OpenExchange | None:
        """Opens the round's next exchange.

        Args:
            weight: this worker's; with 0 it gives nothing, and the averages still come.
            call: what is exchanged; its number is set here. None: the gradients of all blocks.
            nodes: what it gives, on a line of grains. Their weights may be 0.

        Returns:
            None if the round is void.
        """
        assigned = self.member.position.assigned
        assert assigned is not None
        # Each attempt has a key of its own, so all workers count from 0 again.
        if assigned.key != self._round:
            self._round, self._opened = assigned.key, 0
        number = self._opened
        if call is not None:
            call = replace(call, sequence=number, nodes=nodes)
        elif number or nodes:
            call = Call(
                name=_GRADIENTS,
                sequence=number,
                blocks=range(len(self.sizes)),
                nodes=nodes,
                mean=mean_of_gradients(self.member.policy),
            )
        if not self.member.begin(weight, call):
            return None
        # Only now: `begin` replaces the exchange if the map of reducers changed.
        exchange = self.member.exchange
        self._opened += 1
        if not number:
            # Also if this worker gives nothing. What was lost of an attempt before must not be what
            # this round's commit makes the residual.
            self._feedback.begin()
        # At once: the others need not wait until this worker's backward is over.
        gives = weight > 0 or bool(nodes)
        if not gives:
            exchange.abstain()
        elif call is not None and call.data is not None:
            exchange.submit_data()
        return OpenExchange(self.member, exchange, self._feedback, gives=gives)

    def broadcast(self, call: Call, *, last: bool) -> bool:
        """Makes the call's bytes rank 0's; False if the round is void."""
        # The protocol wants every rank but 0 to abstain from a broadcast.
        opened = self.open(float(self.rank == 0), call)
        return opened is not None and opened.finish(last=last) is not None

    def norm(self, blocks: Sequence[Floats]) -> float | None:
        """The L2 norm of averages; None if there are none, or the line does not ask for it."""
        return l2_norm(blocks) if blocks and self.member.policy.gradient_norm else None

    def committed(self, *, moves_weights: bool = True) -> None:
        """The round is committed: what the encoding lost of it is sent with the next."""
        self._feedback.committed(moves_weights=moves_weights)
