"""The striped exchange: one worker's chunks over several reducers, each with its part of the model.

Theory of operation. Each reducer is a lane, an exchange of its own over a channel of its own, that
carries the chunks which the map gives to it. What comes back on all lanes goes to one collector,
which says once that everything is here; what a lane loses, the round loses. The look for values
that must not be sent is taken once a block, before any lane gets a chunk of it.

An exchange concerns the lanes that carry a chunk of its blocks. A worker that abstains says so on
these, and if all do, each answers that there are zeros. Bytes from rank 0, and meetings without
any data, go over the first lane of the map alone: there is nothing to share out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from andon.host.tls import TlsError
from andon.protocol.layout import Layout
from andon.protocol.messages import OpenRound
from andon.protocol.reducers import ReducerShare, chunks_by_address
from andon.protocol.run_settings import Policy
from andon.wire.frames import FrameError
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.bulk import WireExchange, missing_of, refused_block
from andon_trainer.exchange.collector import Collector, Round
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.lane import Carrier, Lane
from andon_trainer.exchange.shared_first import SharedFirst
from andon_trainer.exchange.traffic import Traffic
from andon_trainer.exchange.unreachable import tls_trouble

__all__ = ["ReducerAway", "StripedExchange", "WrongMap"]


class ReducerAway(grpc.RpcError):
    """One reducer of the map can't be reached, or refuses; the text says which and why."""


class WrongMap(ValueError):
    """A map of reducers that is not the whole model, each element once, cut between chunks."""


class StripedExchange:
    """One stream to each of several reducers; an `Exchange`."""

    def __init__(  # noqa: PLR0913  # how to reach the reducers is no concept of its own
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        shares: Sequence[ReducerShare],
        *,
        opening_s: float,
        shared_dir: Path | None = None,
        tls: Path | None = None,
    ) -> None:
        """Makes the buffers of the averages; opens nothing yet.

        Args:
            layout: what is exchanged.
            policy: how.
            inbox: is told what comes of it.
            shares: who averages what.
            opening_s: how long each reducer has to answer when the streams are opened.
            shared_dir: where memory is shared with reducers of this host; None: nowhere.
            tls: the folder of certificates; None: streams are not encrypted.

        Raises:
            WrongMap: the shares are not the whole model, each element once, cut between chunks.
        """
        self._policy = policy
        self._tls = tls
        self._inbox = inbox
        self._collector = Collector(layout, inbox)
        try:
            self._chunks = chunks_by_address(layout, policy.chunk_elements, shares)
        except ValueError as error:
            raise WrongMap(f"the coordinator's map is wrong: {error}") from None
        self._lanes: dict[str, Carrier] = {}
        for address, chunks in self._chunks.items():
            lane = Lane(chunks, self._collector, opening_s)
            if shared_dir is None:
                self._lanes[address] = WireExchange(layout, policy, inbox, lane, tls=tls)
            else:
                self._lanes[address] = SharedFirst(layout, policy, inbox, shared_dir, lane, tls=tls)
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        self._round: Round | None = None
        self._taking_part: list[Carrier] = []
        self._failed = False
        self.first_sent: float | None = None

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return sum((lane.traffic for lane in self._lanes.values()), Traffic())

    @property
    def averages(self) -> list[Floats]:
        """See `Exchange`."""
        return self._collector.averages

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return all(lane.is_open for lane in self._lanes.values())

    @property
    def refused(self) -> bool:
        """See `Exchange`."""
        return self._failed

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the lanes that are not open, all at once; `address` is the coordinator's.

        Raises:
            ReducerAway: one of the reducers can't be reached, or refuses.
        """
        closed = {at: lane for at, lane in self._lanes.items() if not lane.is_open}
        with ThreadPoolExecutor(max(1, len(closed)), thread_name_prefix="andon-open") as pool:
            opened = {
                at or address: pool.submit(lane.open, at or address, opening)
                for at, lane in closed.items()
            }
        for at, future in opened.items():
            try:
                future.result()
            except (grpc.RpcError, TlsError) as error:
                why = tls_trouble(error, at, self._tls) or _told(error)
                raise ReducerAway(f"no reducer at {at}: {why}") from error
            except FrameError as error:
                raise ReducerAway(f"no reducer at {at}: {error}") from error

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._failed = False
        self.first_sent = None
        call = call or self._whole
        missing = {at: missing_of(call, chunks) for at, chunks in self._chunks.items()}
        concerned = [at for at, elements in missing.items() if elements]
        if call.data is not None or not concerned:
            concerned = [next(iter(self._lanes))]
        self._round = Round(
            assigned.key,
            assigned.rank,
            assigned.world_size,
            weight,
            call,
            missing=sum(missing[at] for at in concerned),
            zeros_missing=len(concerned),
        )
        self._taking_part = [self._lanes[at] for at in concerned]
        for lane in self._taking_part:
            lane.carry(self._round)
        self._collector.begin(self._round)

    def submit(self, block: int, flat: Floats) -> None:
        """See `Exchange`."""
        assert self._round is not None
        if self._failed or not self.is_open:
            return
        refused = refused_block(self._round, block, flat, self._policy.encoding)
        if refused is not None:
            self._failed = True
            self._inbox.put(refused)
            return
        self.first_sent = self.first_sent or time.perf_counter()
        for lane in self._taking_part:
            lane.send(block, flat)

    def submit_data(self) -> None:
        """See `Exchange`."""
        self.first_sent = time.perf_counter()
        self._taking_part[0].submit_data()

    def abstain(self) -> None:
        """See `Exchange`."""
        for lane in self._taking_part:
            lane.abstain()

    def end(self) -> None:
        """See `Exchange`; the streams go too if something of the round may be on the way."""
        current, self._round = self._round, None
        self._collector.end()
        if current is not None and current.missing and self.first_sent is not None:
            self.close()

    def close(self) -> None:
        """Ends the streams."""
        for lane in self._lanes.values():
            lane.close()


def _told(error: grpc.RpcError | TlsError) -> str:
    if isinstance(error, TlsError):
        return str(error)
    return f"{error.code().name.lower().replace('_', ' ')}, {error.details()}"
