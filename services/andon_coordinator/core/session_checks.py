"""What a coordinator looks at before a process is a rank."""

from __future__ import annotations

from andon.protocol.limits import PROTOCOL_VERSION
from andon.protocol.peer_calls import MAX_WORLD_SIZE
from andon.protocol.reasons import Reason
from andon_coordinator.core.join_answers import JoinRefusal
from andon_coordinator.core.session_events import AttendRequest

__all__ = ["refusal_of"]


def refusal_of(
    request: AttendRequest,
    *,
    plausible: bool,
    trains: bool,
    world_size: int | None,
    waits: AttendRequest | None,
) -> JoinRefusal | None:
    """Why a process can't be a rank; None: it can.

    Args:
        request: what it says of itself.
        plausible: whether a coordinator could have had the term that it reports.
        trains: whether the run's workers use Train.
        world_size: what the ranks that are here expect; None: nobody is here.
        waits: the process that waits as this rank; None: none does.
    """
    rank, size = request.rank, request.world_size
    if request.protocol_version != PROTOCOL_VERSION:
        return JoinRefusal(
            reason=Reason.VERSION,
            message=f"the rank speaks version {request.protocol_version} of the protocol, and the "
            f"coordinator {PROTOCOL_VERSION}: install the same version of Andon at both ends",
            component="protocol_version",
            mine=str(request.protocol_version),
            theirs=str(PROTOCOL_VERSION),
        )
    if invalid := _invalid(request, plausible=plausible):
        return JoinRefusal(reason=Reason.INVALID_MESSAGE, message=invalid)
    if trains:
        return JoinRefusal(
            reason=Reason.OTHER_USE,
            message="workers of this run use Train, with `Line`, and a run is for workers of a "
            "line or for ranks of sessions: serve another run for these ranks",
        )
    if world_size not in (None, size):
        return JoinRefusal(
            reason=Reason.WORLD_DIFFERS,
            message=f"rank {rank} expects {size} ranks, and those that are here expect "
            f"{world_size}: start all ranks with the same number of ranks",
            component="world_size",
            mine=str(size),
            theirs=str(world_size),
        )
    # Its stream is open: a process that is gone or frozen loses it within a lease, by pings.
    if waits is not None and waits.incarnation != request.incarnation:
        return JoinRefusal(
            reason=Reason.SLOT,
            message=f"another process, on {waits.node_id or 'another host'}, waits as rank {rank}: "
            "give each process a rank of its own, or end that one",
            component="rank",
            mine=str(rank),
            theirs=str(rank),
        )
    return None


def _invalid(request: AttendRequest, *, plausible: bool) -> str:
    rank, size = request.rank, request.world_size
    if not 0 < size <= MAX_WORLD_SIZE:
        return f"a session has 1 to {MAX_WORLD_SIZE} ranks, not {size}"
    if not 0 <= rank < size:
        return f"a rank of {size} is from 0 to {size - 1}, not {rank}"
    if not request.incarnation:
        return "an incarnation is random and not 0"
    if not plausible:
        return (
            f"the rank reports the term {request.greatest_term}, which is too far ahead of the "
            "coordinator's clock: set the clock that is wrong"
        )
    return ""
