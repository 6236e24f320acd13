"""The welcome: what a worker that was accepted is told, its session token included."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol import tokens
from andon.protocol.run_settings import Liveness, Policy
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import ring_pb2
from andon.wire import conversion
from andon_coordinator.core.effects import AcceptJoin, Assign, Assignment
from andon_coordinator.transport.translation import message_to

__all__ = ["Welcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What every worker is told alike."""

    run_id: str
    secret: bytes
    """Shared with the reducers of the run: session tokens are made of it."""
    policy: Policy
    liveness: Liveness

    def assignment_to(self, effect: Assign) -> pb.TrainResponse:
        """An assignment, with who stands beside the rank if the line is a ring."""
        message, work = message_to(effect), effect.assignment
        size = len(work.roster)
        if work.ring_addresses and size > 1:
            before, after = (work.rank - 1) % size, (work.rank + 1) % size
            neighbours = ring_pb2.RingNeighbours(
                successor_address=work.ring_addresses[after],
                successor_token=self._link(work, work.rank, after),
                predecessor_token=self._link(work, before, work.rank),
            )
            message.shard_assignment.ring.CopyFrom(neighbours)
        return message

    def _link(self, work: Assignment, sender: int, receiver: int) -> bytes:
        roster = work.roster
        return tokens.link_token(
            self.secret, self.run_id, work.key, roster[sender], roster[receiver]
        )

    def message_to(self, effect: AcceptJoin, term: int) -> pb.TrainResponse:
        """The answer to a Join."""
        return pb.TrainResponse(
            join_accepted=pb.JoinAccepted(
                worker=effect.worker,
                # Streams are numbered as they come: the serial grows with each join of a slot.
                session_token=tokens.session_token(
                    self.secret, self.run_id, effect.worker, (term, effect.stream)
                ),
                reducers=conversion.shares_to_proto(effect.reducers),
                plan=conversion.plan_to_proto(effect.plan),
                policy=conversion.policy_to_proto(self.policy),
                liveness=conversion.liveness_to_proto(self.liveness),
                join_status=conversion.enum_to_proto(effect.join_status),
                head=conversion.key_to_proto(effect.head),
                step=effect.step,
                term=term,
                halt=conversion.evidence_to_proto(effect.halt),
                run_id=self.run_id,
            )
        )
