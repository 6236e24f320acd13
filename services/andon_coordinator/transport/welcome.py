"""The welcome: what a worker that was accepted is told, its session token included."""

from __future__ import annotations

from dataclasses import dataclass

from andon import tokens, wire
from andon.terms import Liveness, Policy
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core.effects import AcceptJoin

__all__ = ["Welcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What every worker is told alike."""

    run_id: str
    secret: bytes
    """Shared with the reducers of the run: session tokens are made of it."""
    policy: Policy
    liveness: Liveness

    def message_to(self, effect: AcceptJoin, term: int) -> pb.TrainResponse:
        """The answer to a Join."""
        return pb.TrainResponse(
            join_accepted=pb.JoinAccepted(
                worker=effect.worker,
                session_token=tokens.issue(self.secret, self.run_id, effect.worker),
                reducers=wire.shares_to_proto(effect.reducers),
                plan=wire.plan_to_proto(effect.plan),
                policy=wire.policy_to_proto(self.policy),
                liveness=wire.liveness_to_proto(self.liveness),
                standing=wire.enum_to_proto(effect.standing),
                head=wire.key_to_proto(effect.head),
                step=effect.step,
                term=term,
                halt=wire.evidence_to_proto(effect.halt),
            )
        )
