"""Where a worker on a line stands: its head, its round, the line's policy. Nothing here waits."""

from __future__ import annotations

from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import Policy
from andon_trainer.core.computed import Computed
from andon_trainer.core.conversation import Conversation
from andon_trainer.core.events import Assigned, TransferAsked
from andon_trainer.core.worker_state import WorkerState
from andon_trainer.exchange.control.connection import Connection

__all__ = ["MemberFacts"]


class MemberFacts:
    """What anybody may ask of a membership, at any time."""

    _state: WorkerState
    _conversation: Conversation
    _link: Connection

    @property
    def head(self) -> Key | None:
        """The key of the last record that this worker applied; None before it holds weights."""
        return self._state.head

    @property
    def cursor(self) -> Cursor:
        """The next position of the line's data."""
        return self._state.cursor

    @property
    def step(self) -> int:
        """Steps committed."""
        return self._state.step

    @property
    def installed_from(self) -> TransferAsked | None:
        """The transfer that brought the state which was installed last; None: its own state."""
        return self._state.installed_from

    @property
    def assigned(self) -> Assigned | None:
        """The present round."""
        return self._state.assigned

    @property
    def computed(self) -> Computed:
        """What this worker has computed beyond its head; local steps add to it."""
        return self._state.computed

    @property
    def stop_reason(self) -> str:
        """Why the run is over; empty if it is not."""
        return self._state.stop_reason

    @property
    def doubts(self) -> int:
        """How often what this worker computed became useless for another attempt."""
        return self._conversation.doubts

    @property
    def pacing(self) -> bytes:
        """What the line knows of its workers' speed, by its last commit."""
        return self._state.pacing

    @property
    def policy(self) -> Policy:
        """How the line works, by the answer to the latest Join."""
        return self._link.joined.policy

    @property
    def coordinator_can(self) -> frozenset[str]:
        """The coordinator's capabilities, by the answer to the latest Join."""
        return self._link.joined.capabilities

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0: never."""
        return self._link.joined.policy.digest_every
