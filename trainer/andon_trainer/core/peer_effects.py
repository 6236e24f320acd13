"""An open call between ranks, and the effects of `group_calls` and `send_calls`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from andon.protocol.peer_calls import EAGER_BYTES, Call
from andon.protocol.peer_frames import Begin, Piece
from andon.protocol.sessions import SessionEnd
from andon_trainer.core.peer_flow import Flow, Give, MakeSome, PeerViolation
from andon_trainer.core.peer_plan import Sizes, Span
from andon_trainer.core.peer_work import Work

__all__ = [
    "Calls",
    "CheckInput",
    "Early",
    "EndCall",
    "Opening",
    "PeerEffect",
    "PlaceKept",
    "ReportFault",
    "RunMakes",
    "SendBegin",
    "SendPiece",
    "UseMemory",
    "sizes_of",
]


@dataclass(slots=True, eq=False)
class Opening:
    """A call that this rank has made and that has not ended."""

    work: Work
    number: int
    """Its number in the group; of a SEND, among those of its sender to its receiver."""
    peer: int | None = None
    """The other rank of a SEND, once it is known."""
    flow: Flow | None = None
    """None: earlier calls of the group are open, or nobody has sent what it receives."""
    begun: set[int] = field(default_factory=set)
    """The peers whose Begin is here."""
    unchecked: bool = False
    """Whether nothing may leave, because the gate has not seen all of the input."""
    checked: bool = False
    """Whether the gate has seen all of it."""
    in_memory: bool = False
    """Whether its parts among neighbours are not all through."""
    placing: set[int] = field(default_factory=set)
    """The peers of which something that came early is being put where it belongs."""
    ended: bool = False

    @property
    def waits_for_all(self) -> bool:
        """Whether every peer's Begin must come, since no bytes do: a barrier."""
        return self.flow is not None and not self.flow.plan.stages

    def missing(self) -> list[int]:
        """The ranks of the group of which something is missing, in order."""
        flow = self.flow
        if flow is None:
            return [] if self.peer is None else [self.peer]
        return sorted(self._awaited(flow) or flow.unsent_to())

    def needs(self, deaf: set[int]) -> set[int]:
        """The ranks over lanes without which it can't end: they have to begin it, or to give more.

        What is only on its way to a rank needs nothing of it, unless it is `deaf`: takes nothing.
        """
        flow = self.flow
        if flow is None:
            return set()
        unsent = set(flow.unsent_to()) - (self.begun - deaf)
        return ((self._awaited(flow) - self.placing) | unsent) & flow.elsewhere

    def _awaited(self, flow: Flow) -> set[int]:
        """The ranks from which something is to come."""
        found = set(flow.missing_from())
        return found | (flow.elsewhere - self.begun) if self.waits_for_all else found


@dataclass(frozen=True, slots=True)
class SendBegin:
    """Tell a rank that this one has begun a call; it is the first that is sent to it of a call."""

    call: Opening
    peer: int
    gives_bytes: int


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Send bytes to a rank; `left` once the kernel has them."""

    call: Opening
    give: Give


@dataclass(frozen=True, slots=True)
class PlaceKept:
    """Put what came early where it belongs; `placed` afterwards."""

    call: Opening
    peer: int
    stage: int
    spans: tuple[Span, ...]
    kept: memoryview
    upto: int


@dataclass(frozen=True, slots=True)
class RunMakes:
    """Copy or reduce; `made` after each."""

    call: Opening
    makes: tuple[MakeSome, ...]


@dataclass(frozen=True, slots=True)
class CheckInput:
    """Have the gate look at all of the call's input; `checked` if it is finite."""

    call: Opening


@dataclass(frozen=True, slots=True)
class UseMemory:
    """Give neighbours their parts, and get theirs; `through_memory` at the end."""

    call: Opening


@dataclass(frozen=True, slots=True)
class EndCall:
    """The call is done: its results are there, and nobody reads its input."""

    call: Opening


@dataclass(frozen=True, slots=True)
class ReportFault:
    """The session can't go on."""

    end: SessionEnd
    culprit: int
    """A rank of the group."""
    message: str
    call: Opening | None = None
    """This rank's call."""
    own: tuple[int, Call] | None = None
    """This rank's call and its number, if it has ended."""
    other: tuple[int, Call] | None = None
    """The culprit's call and its number, if calls differ."""


PeerEffect = (
    SendBegin | SendPiece | PlaceKept | RunMakes | CheckInput | UseMemory | EndCall | ReportFault
)


def sizes_of(work: Work) -> tuple[Sizes, ...]:
    """The lengths of a work's parts."""
    return tuple(
        Sizes(tuple(v.nbytes for v in part.gives), tuple(v.nbytes for v in part.takes))
        for part in work.parts
    )


@dataclass(slots=True)
class Early:
    """A call that a peer has begun and this rank has not, and what came of it."""

    begin: Begin
    claimed: int = 0
    """Bytes that came, or are on their way into memory."""
    kept: bytearray = field(default_factory=bytearray)
    """What the peer gives in stage 0."""

    def claim(self, piece: Piece) -> None:
        """Counts a piece that is about to be received.

        Raises:
            PeerViolation: it may not come before this rank has begun the call.
        """
        most = min(self.begin.gives_bytes, EAGER_BYTES)
        upto = piece.offset + piece.length
        if piece.stage or piece.offset != self.claimed or upto > most:
            raise PeerViolation(
                f"bytes {piece.offset} to {upto} of stage {piece.stage} of call {piece.sequence}, "
                f"which this rank has not begun: {self.claimed} came, and at most {most} may"
            )
        self.claimed = upto


@dataclass(slots=True)
class Calls:
    """What calls of every kind have in common: progress, and that a fault ends everything."""

    group: int
    """The number that their frames have."""
    failed: bool = False
    """Whether a fault was found. Nothing more comes of any event."""
    gone_ranks: set[int] = field(default_factory=set)
    """Ranks that begin no more calls, and give nothing more."""
    deaf_ranks: set[int] = field(default_factory=set)
    """Those of them to which nothing can be sent any more."""

    def gone(self, peer: int) -> list[PeerEffect]:
        """A rank begins no more calls, and gives nothing more."""
        self.gone_ranks.add(peer)
        return self._guarded(self._miss_the_gone)

    def deaf(self, peer: int) -> list[PeerEffect]:
        """Nothing can be sent to a rank that is gone."""
        self.deaf_ranks.add(peer)
        return self._guarded(self._miss_the_gone)

    def _miss_the_gone(self) -> list[PeerEffect]:
        """The fault, if an open call needs a rank that is gone."""
        raise NotImplementedError

    def landing(self, peer: int, piece: Piece) -> tuple[Opening, list[Span]] | None:
        """Where a piece goes, and of which call; None: it is kept, and given to `landed`.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        if self.failed:
            return None  # Its Begin was not taken any more: nothing becomes of the bytes.
        call = self._met(peer, piece.sequence)
        if call is not None:
            assert call.flow is not None, "a call that was met has a flow"
            return call, call.flow.landing(peer, piece.stage, piece.offset, piece.length)
        early = self._came_early(peer, piece.sequence)
        if early is None:
            raise PeerViolation(f"a piece of call {piece.sequence}, which is not open")
        early.claim(piece)
        return None

    def landed(self, peer: int, piece: Piece, kept: memoryview | None) -> list[PeerEffect]:
        """A piece is where `landing` said, or in `kept`."""
        call = self._met(peer, piece.sequence)
        if call is not None:
            if kept is None:
                return self.placed(call, piece.stage, peer, piece.offset + piece.length)
            # It was early when its head came, and this rank has made the call since.
            return [self._place(call, peer, piece, kept)]
        early = self._came_early(peer, piece.sequence)
        if kept is not None and early is not None:
            early.kept += kept
        return []

    def _met(self, peer: int, number: int) -> Opening | None:
        """The open call that a peer gives something to, if both have begun it."""
        raise NotImplementedError

    def _came_early(self, peer: int, number: int) -> Early | None:
        """What a peer has begun, and this rank has not."""
        raise NotImplementedError

    def left(self, call: Opening, stage: int, give: int, upto: int) -> list[PeerEffect]:
        """Nobody reads these bytes of a give here any more."""
        return self._counted(call, lambda flow: flow.left(stage, give, upto))

    def made(self, call: Opening, stage: int, make: int, upto: int) -> list[PeerEffect]:
        """A part of a make is done."""
        return self._counted(call, lambda flow: flow.made(stage, make, upto))

    def summed(self, call: Opening, peer: int, upto: int, some: MakeSome) -> list[PeerEffect]:
        """Bytes of a peer came, and were reduced on the way."""

        def count(flow: Flow) -> None:
            flow.landed(peer, some.stage, upto)
            flow.made(some.stage, some.make, some.stop)

        return self._counted(call, count)

    def placed(self, call: Opening, stage: int, peer: int, upto: int) -> list[PeerEffect]:
        """Bytes of a peer are where they belong."""
        call.placing.discard(peer)
        effects = self._counted(call, lambda flow: flow.landed(peer, stage, upto))
        if peer in self.gone_ranks:
            effects += self._guarded(self._miss_the_gone)
        return effects

    def _place(self, call: Opening, peer: int, piece: Piece, kept: memoryview) -> PeerEffect:
        """Puts what came early where it belongs."""
        assert call.flow is not None
        spans = tuple(call.flow.landing(peer, piece.stage, piece.offset, piece.length))
        call.placing.add(peer)
        return PlaceKept(call, peer, piece.stage, spans, kept, piece.offset + piece.length)

    def checked(self, call: Opening) -> list[PeerEffect]:
        """All of the call's input is finite."""
        call.unchecked, call.checked = False, True
        return self._counted(call, lambda flow: None)

    def through_memory(self, call: Opening) -> list[PeerEffect]:
        """All parts among neighbours are through."""
        call.in_memory = False
        return self._counted(call, lambda flow: None)

    def _counted(self, call: Opening, count: Callable[[Flow], None]) -> list[PeerEffect]:
        if self.failed or call.ended:
            return []
        assert call.flow is not None, "only an open call makes progress"
        count(call.flow)
        return self._guarded(lambda: self._go_on(call))

    def _go_on(self, call: Opening) -> list[PeerEffect]:
        """What a call can do next, and its end if that was all."""
        flow = call.flow
        if flow is None or call.ended:
            return []
        effects: list[PeerEffect] = []
        if not call.unchecked:
            gives, makes = flow.advance()
            effects += [SendPiece(call, each) for each in gives]
            if makes:
                effects.append(RunMakes(call, tuple(makes)))
        heard = not call.waits_for_all or flow.elsewhere <= call.begun
        if flow.whole and heard and not call.in_memory and not call.unchecked:
            call.ended = True
            effects += [EndCall(call), *self._after(call)]
        return effects

    def _after(self, call: Opening) -> list[PeerEffect]:
        """What follows the end of a call."""
        raise NotImplementedError

    def _guarded(self, act: Callable[[], list[PeerEffect]]) -> list[PeerEffect]:
        """Runs `act`. If it finds a fault, that is all that happens: nobody completes anything."""
        if self.failed:
            return []
        effects = act()
        faults = [each for each in effects if isinstance(each, ReportFault)]
        if not faults:
            return effects
        self.failed = True
        return [faults[0]]

    def _differ(
        self, peer: int, begin: Begin, own: Opening | tuple[int, Call] | None, why: str
    ) -> ReportFault:
        """The fault of calls that differ."""
        call = own if isinstance(own, Opening) else None
        past = None if isinstance(own, Opening) else own
        mine = call.work.call if call else past[1] if past else "nothing that it takes part in"
        text = f"this rank made {mine}, and rank {peer} of the group {begin.call}"
        return ReportFault(
            end=SessionEnd.CALLS_DIFFER,
            culprit=peer,
            message=f"call {begin.sequence}: {text}{why}",
            call=call,
            own=past,
            other=(begin.sequence, begin.call),
        )

    def _left_behind(self, peer: int, call: Opening) -> ReportFault:
        """The fault of a rank that ended though this one needs it."""
        return ReportFault(
            end=SessionEnd.RANK_LEFT,
            culprit=peer,
            message=f"rank {peer} of the group ended, and {call.work.call} needs it",
            call=call,
        )
