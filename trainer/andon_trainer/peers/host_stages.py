"""Calls of a group on several hosts: what neighbours give each other goes through memory.

The lanes' core runs the call. This makes the transfers among neighbours, stage by stage, on the
group's own thread, and each stage part by part: a part is given once it is there, also what lanes
bring, and what is made of it may go on over lanes at once. So links need not wait for memory.
"""

from __future__ import annotations

import logging

from andon.host.arena import SharedMemoryUnavailable
from andon.protocol.peer_calls import CallKind
from andon_trainer.core.peer_effects import Opening, PeerEffect
from andon_trainer.core.peer_flow import row_of
from andon_trainer.core.peer_plan import Places, Stage, Transfer
from andon_trainer.errors import SessionEnded
from andon_trainer.peers.host_calls import HostGroup, differing_fault, left_fault
from andon_trainer.peers.lane_calls import Deferred, LaneCalls
from andon_trainer.peers.memory import CallDiffers, NeighbourLeft, NeighbourMemory
from andon_trainer.peers.memory_calls import StageRows, transfer
from andon_trainer.peers.open_call import OpenCall
from andon_trainer.peers.values import BadValue

__all__ = ["HostStages"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How often a thread that waits looks whether the session is over."""
_SYMMETRIC = frozenset({CallKind.ALL_REDUCE, CallKind.ALL_GATHER})
"""Kinds in which either all neighbours have a part in a stage or none has."""


class HostStages:
    """The transfers among neighbours of one group."""

    def __init__(
        self,
        group: HostGroup,
        lanes: LaneCalls,
        memory: NeighbourMemory,
        places: Places,
        rank: int,
    ) -> None:
        """Makes nothing yet.

        Args:
            group: whose calls they are.
            lanes: its calls, which this gets from there.
            memory: what neighbours share.
            places: where the group's ranks are.
            rank: this rank in the group.
        """
        self._group, self._lanes, self._memory = group, lanes, memory
        self._near = places.neighbours(rank)
        lanes.through_memory = self._run

    def _run(self, call: OpenCall) -> list[Deferred]:
        """Makes a call's transfers; what they lead to. Runs on the group's own thread."""
        lanes, core, opening = self._lanes, self._lanes.collectives, call.opening
        assert opening is not None
        try:
            if not self._memory.opened:
                self._memory.open(self._group.look)
            for stage in self._stages(opening):
                self._transfer(call, opening, stage)
        except SharedMemoryUnavailable as error:
            _log.warning("a group on several hosts exchanges over TCP lanes alone: %s", error)
            return lanes.event(core, core.give_up_memory)
        except SessionEnded:
            return []  # Whoever ends the session ends the call.
        except BadValue as bad:
            lanes.refuse(core, call, bad)
            return []
        except CallDiffers as differs:
            self._group.faulty(call, differing_fault(self._group, call.work, differs))
            return []
        except NeighbourLeft as left:
            self._group.faulty(call, left_fault(call.work, left))
            return []
        except Exception as error:
            lanes.failed(core, call, error)
            return []
        return lanes.event(core, lambda: core.through_memory(opening))

    def _stages(self, opening: Opening) -> list[int]:
        """The stages in which some neighbour may give another something: the same for all."""
        assert opening.flow is not None
        stages = opening.flow.plan.stages
        if opening.work.call.kind not in _SYMMETRIC:
            # A barrier has none, and needs one.
            return list(range(len(stages))) or [0]
        near = frozenset(self._near)
        return [
            number
            for number, stage in enumerate(stages)
            if near & {each.peer for each in (*stage.gives, *stage.gets)}
        ]

    def _transfer(self, call: OpenCall, opening: Opening, number: int) -> None:
        flow, lanes, core = opening.flow, self._lanes, self._lanes.collectives
        assert flow is not None
        stage = flow.plan.stages[number] if flow.plan.stages else Stage()
        near = self._near
        gives = {each.peer: (i, each) for i, each in enumerate(stage.gives) if each.peer in near}
        gets = {each.peer: each for each in stage.gets if each.peer in near}

        def ready(start: int, stop: int) -> None:
            with lanes.moved:
                while any(
                    flow.give_ready(number, i) < min(stop, each.size) for i, each in gives.values()
                ):
                    lanes.moved.wait(_LOOK_S)
                    self._group.look(())
            for _, each in gives.values():
                call.leaving(row_of(each.spans, start, stop))

        def passed(start: int, stop: int) -> None:
            def through() -> list[PeerEffect]:
                effects: list[PeerEffect] = []
                for i, each in gives.values():
                    if start < each.size:
                        effects += core.left(opening, number, i, min(stop, each.size))
                for peer, each in gets.items():
                    if start < each.size:
                        effects += core.placed(opening, number, peer, min(stop, each.size))
                return effects

            # Now: other hosts, or the next stage, may need what is made of it.
            lanes.settle(core, lanes.event(core, through))

        rows = StageRows(
            number=number,
            gives=[_views(call, gives[peer][1] if peer in gives else None) for peer in near],
            takes=[_views(call, gets.get(peer)) for peer in near],
            ready=ready,
            passed=passed,
        )
        transfer(self._memory, call.work, opening.number, rows, self._group.look)


def _views(call: OpenCall, transfer: Transfer | None) -> list[memoryview]:
    """Where a transfer's bytes are."""
    return [] if transfer is None else [call.view(span) for span in transfer.spans]
