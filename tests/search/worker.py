"""A worker: the real `Conversation`, and around it what streams and a script's loop do.

`settle` is the loop of `Driver.wait`. What a turn does to the world goes into `out`, in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from andon.protocol.attestations import DIGEST_BYTES
from andon.protocol.capabilities import LEARNING, SAME_BITS, VERIFIES
from andon.protocol.grains import Grains, NodeLoss, cover
from andon.protocol.messages import BlockFault, RoundAborted, StaleRound, TreeNode
from andon.protocol.records import Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import Ranges
from andon_coordinator.core import events as on
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.effects import (
    AwaitAnswer,
    DropComputed,
    Effect,
    EndExchange,
    EndRun,
    GoOn,
    HearOn,
    JoinAgain,
    Listen,
    MoveState,
    ReportFault,
    ReportState,
    RequestWork,
    SendNumber,
    StepDone,
    StopListening,
)
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    Committed,
    Event,
    ExchangeFailed,
    Halted,
    ListeningLost,
    Resumed,
    TransferAsked,
)
from andon_trainer.core.keeping import Kept
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from scenarios.attesting import attested, mean_checked
from scenarios.line_bench import LAYOUT
from search.local_weights import LocalWeights
from search.messages import (
    Accepted,
    Checkpoint,
    Chunk,
    CloseData,
    CloseStream,
    Down,
    Lost,
    Open,
    OpenData,
    Out,
    Refused,
)
from search.numbers import Incarnation, Serial, Stream, Weights
from search.weights import Averages, Contribution, Library, Wrong

__all__ = ["Given", "Place", "Worker"]


Applied = Callable[[Weights, Record, Averages | None], Weights]


def _not_applied(weights: Weights, _record: Record, _averages: Averages | None) -> Weights:
    return weights


@dataclass(frozen=True, slots=True)
class Given:
    """A state on its way to a worker that learns, as it was when it was cut."""

    asked: TransferAsked
    weights: Weights
    scheduled: int


class Place(enum.Enum):
    """Where the script is."""

    FIRST = enum.auto()
    """In `Membership.join`, waiting for weights."""
    WORK = enum.auto()
    """In `next_round`."""
    COMPUTES = enum.auto()
    """It computes what its exchange sends, which it has not begun."""
    TURN = enum.auto()
    """In `take_turn`, with a share that is computed and that it was late with."""
    AHEAD = enum.auto()
    """It computes ahead, and looks between two local steps whether its round is void."""
    LEAVES = enum.auto()
    """In `leave_epoch`."""
    AVERAGES = enum.auto()
    """In `await_averages`."""
    VERDICT = enum.auto()
    """It found a bad value in what it computes, and waits for the end of its round."""
    COMMIT = enum.auto()
    """In `await_commit`."""
    MEAN = enum.auto()
    """In `scalar_all_reduce`, after a step."""
    ENOUGH = enum.auto()
    """Past the last step: it requests more work only if another worker waits for state."""
    GONE = enum.auto()
    """Refused, or the run is over: the process has ended."""


_EXCHANGING = (Place.AHEAD, Place.AVERAGES, Place.VERDICT)
"""Where it takes averages from its inbox."""


@dataclass(slots=True)
class Worker:
    """One process in one slot."""

    slot: int
    workers: int
    steps: int
    plan: RunPlan
    chunks: int
    incarnation: Incarnation
    weights: Weights
    """Those of its head."""
    numbers: Serial
    """Streams that the slot ever had."""
    means: int = 0
    """Means after each step."""
    local_steps: bool = False
    """Whether it makes local steps, and exchanges the change of its weights."""
    stands: bool = False
    """Whether it asks for the next step with its report of each, whatever its script does then."""
    computes: bool = False
    """Whether anything may happen while it computes what its exchange sends."""
    quorum: bool = False
    """Whether it says when it has computed what its exchange sends."""
    learns: bool = False
    """Whether it can learn the line's state while the line trains."""
    spare: bool = False
    """Whether it is a spare."""
    verifies: bool = False
    """Whether it can verify; all state one arithmetic."""
    ends: bool = False
    """Whether it leaves once the run is over."""
    listens: bool = False
    """Whether its data stream only listens."""
    heard: dict[Key, Averages] = field(default_factory=dict)
    """Averages of rounds that its script has not come to."""
    applied: Applied = _not_applied
    """The library's, for records that a learner takes when its script is there."""
    coming: tuple[Record, ...] = ()
    """Records that it was told of while it learns, and that are not in its weights."""
    giving: tuple[Given, ...] = ()
    """States that it gives to learners while it trains."""
    local: LocalWeights = field(init=False)
    conversation: Conversation = field(default_factory=Conversation)
    place: Place = Place.FIRST
    stream: Stream | None = None
    joining: bool = False
    data: Stream | None = None
    exchanging: Key | None = None
    averages: Averages | None = None
    transfer: TransferAsked | None = None
    greatest_term: int = 0
    mean: int = 0
    """Which of the means after a step is the next, or the one that it waits for."""
    given: float = 0.0
    """What it gave to that one."""
    scheduled: int = 0
    """How often the script moved its scheduler: once for each step, after the step's means."""
    turning: bool = False
    """Whether it waits, with a share that it was late with, for the round that takes that up."""
    midway: bool = False
    """Whether it goes on computing what it was late with, after the step that it makes up."""
    sums: tuple[Kept, Weights] | None = None
    """With grains: what it has summed since the head, and of which weights."""
    heard_otherwise: Key | None = None
    """The last round in which a sum came to it otherwise than it was sent."""

    @property
    def state(self) -> WorkerState:
        """Its head and its round."""
        return self.conversation.state

    @property
    def waits(self) -> bool:
        """Whether its script may go on: not while it joins or moves state."""
        return not (self.joining or self.transfer is not None or self.place is Place.GONE)

    @property
    def looks(self) -> bool:
        """Whether it takes events: with local steps also between two of them."""
        return self.place is not Place.COMPUTES or self.local_steps

    @property
    def busy(self) -> bool:
        """Whether it takes events only when it looks, so that some may be there behind a loss."""
        return self.transfer is not None or self.place in (Place.COMPUTES, Place.AHEAD)

    def __post_init__(self) -> None:
        self.local = LocalWeights(self.slot)

    def hears_otherwise(self, key: Key) -> None:
        """A sum came to it otherwise than it was sent, in this round."""
        self.heard_otherwise = key

    def load(self, checkpoint: Checkpoint) -> None:
        """The process loads a checkpoint before it joins."""
        state = self.state
        state.head, state.cursor, state.step = checkpoint.head, checkpoint.cursor, checkpoint.step
        self.weights, self.scheduled = checkpoint.weights, checkpoint.scheduled
        self._wait_at(Place.FIRST, Wait.WEIGHTS)

    def start(self, out: list[Out]) -> None:
        """The process begins, or was refused a slot and tries again."""
        self._join(out)

    def take(self, event: Down | Refused, library: Library, out: list[Out]) -> None:
        """One event from the inbox."""
        if isinstance(event, Refused):
            self.perishes()
            return
        taken = self._event_of(event)
        if taken is not None:
            before = self.state.head
            if isinstance(taken, Halted):
                self.local.halted(taken.evidence)
            learns = self.conversation.attending.learning
            if isinstance(taken, Committed) and learns:
                self.coming = (*self.coming, taken.record)
            effects = self.conversation.receive(taken)
            if learns:
                self._follow()
            elif isinstance(taken, Committed) and self.state.head == taken.record.key != before:
                averages = self.averages if taken.record.kind is RecordKind.STEP else None
                self.weights = library.applied(self.weights, taken.record, averages)
                if taken.record.kind is RecordKind.STEP:
                    self._committed(taken.record)
            self._do(effects, out, taken)
        self.settle(out)

    def accepted(self, answer: Accepted, out: list[Out]) -> Halted | Resumed | None:
        """The Join was accepted; what this puts into the inbox."""
        self.joining = False
        self.greatest_term = max(self.greatest_term, answer.term)
        if answer.in_sync and answer.head != self.state.head:
            raise Wrong("a worker is called in sync with a head that it does not have")
        halt = self.state.halt
        self._close_data(out)
        assert self.stream is not None
        effects = self.conversation.joined(
            self.stream,
            in_sync=answer.in_sync,
            behind=answer.behind,
            worker=self.slot,
            halted=answer.halt is not None,
        )
        self._do(effects, out)
        if answer.halt is not None:
            return Halted(answer.halt)
        return None if halt is None else Resumed(halt.id)

    def join_failed(self, out: list[Out]) -> None:
        """The stream ended before an answer: it tries again."""
        self._join(out)

    def computed(self, out: list[Out]) -> None:
        """It has computed what its exchange sends, and goes on."""
        if self.state.phase is RoundPhase.LATE:
            self._compute()
            self.turning = True
            self._turn()
        else:
            self._exchange(out)
        self.settle(out)

    def makes_up(self, out: list[Out]) -> None:
        """Between two local steps of what it is late with, it takes a step of the others."""
        if self.conversation.make_up() is not None:
            self.midway = True
            self._exchange(out)
            self.settle(out)

    def _compute(self) -> None:
        """What is missing of its share, as further local steps."""
        assigned, computed = self.state.assigned, self.state.computed
        assert assigned is not None
        self.local.compute(self._counted(computed.missing(assigned)), ahead=False)
        computed.add(assigned.positions)

    def computes_ahead(self, out: list[Out]) -> None:
        """It computes what it was dealt ahead, and waits for the averages."""
        assigned, computed = self.state.assigned, self.state.computed
        assert assigned is not None
        missing = computed.missing_ahead(assigned)
        self.local.compute(self._counted(missing), ahead=True)
        computed.add_ahead(missing)
        self._wait_at(Place.AVERAGES, Wait.AVERAGES)
        self.settle(out)

    def refuses(self, out: list[Out]) -> None:
        """What it computes is not finite: in `refuse_loss`, or in `refuse_gradient`."""
        fault = self.state.own_fault("NON_FINITE_GRADIENT", "", "nan")
        self._do(self.conversation.refuse(fault), out)
        self._wait_at(Place.VERDICT, Wait.VERDICT)
        self.settle(out)

    def begins_anew(self, out: list[Out]) -> None:
        """The script caught an exception in the middle of a step, and loops again."""
        self.conversation.wait = None
        self._do(self.conversation.begin_anew(), out)
        self._request_work()
        self.settle(out)

    def leaves_epoch(self, out: list[Out]) -> None:
        """The script's loop over the epoch ends before the epoch does."""
        self._do(self.state.leave_epoch(), out)
        self._wait_at(Place.LEAVES, Wait.EPOCH_END)
        self.settle(out)

    def asks_on(self, out: list[Out]) -> None:
        """The script wants one step more than it had to: another worker waits for its state."""
        self._request_work()
        self.settle(out)

    def transferred(
        self, donor: Weights | None, scheduled: int, library: Library, out: list[Out]
    ) -> None:
        """The transfer is over, with the donor's weights and scheduler, or with nothing."""
        asked = self.transfer
        assert asked is not None
        self.transfer = None
        if donor is not None and not asked.sends:
            if library.head(donor) != asked.head:
                raise Wrong(f"the weights of {library.head(donor)} arrive as those of {asked.head}")
            self.weights, self.scheduled = donor, scheduled
            self.coming = tuple(each for each in self.coming if each.key > asked.head)
        failure = "" if donor is not None else "the other end is gone"
        self._do(self.conversation.moved(asked, failure), out)
        self.settle(out)

    def _follow(self) -> None:
        """The weights are those of the head that the cores came to."""
        head = self.state.head
        while self.coming and head is not None and self.coming[0].key <= head:
            record, self.coming = self.coming[0], self.coming[1:]
            averages = self.averages if record.kind is RecordKind.STEP else None
            self.weights = self.applied(self.weights, record, averages)
            if record.kind is RecordKind.STEP:
                self._committed(record)

    def _committed(self, record: Record) -> None:
        """A step is in its weights."""
        assigned = self.state.assigned
        assert assigned is not None
        if assigned.attends:
            return  # It has given nothing: what it owes is as it was.
        self.local.committed(record, assigned.fragment)
        self._forget_sums()
        self.state.computed.left_over = bool(self.local.left_over)

    def gave(self, given: Given) -> None:
        """A learner has the state."""
        self.giving = tuple(each for each in self.giving if each != given)

    def settle(self, out: list[Out]) -> None:
        """The script goes on until it waits; this affects no other party."""
        while self.waits and self._goes_on(out):
            pass
        ahead = self.place is Place.AHEAD and self.state.phase is RoundPhase.OPEN
        if self.state.phase is not RoundPhase.HELD and not ahead:
            self.averages = None

    def _goes_on(self, out: list[Out]) -> bool:
        """One turn of the wait, or the script's next; False if it needs an event for that."""
        conversation = self.conversation
        if self.place is Place.ENOUGH and self.ends:
            self._leave(out)
            return False
        if self.place is Place.ENOUGH:
            return not conversation.paused and self.state.step < self.steps and self._turn()
        if self.place in (Place.COMPUTES, Place.AHEAD):
            over = self.state.phase not in (RoundPhase.OPEN, RoundPhase.LATE)
            return over and self._turn()
        if not conversation.over:
            effects = conversation.poll()
            self._follow()
            self._do(effects, out)
            if not conversation.over:
                return bool(effects)
        conversation.wait = None
        return self._next(out)

    def _next(self, out: list[Out]) -> bool:
        """What the script waited for has arrived, or can't arrive any more."""
        match self.place:
            case Place.WORK:
                assert self.state.assigned is not None
                if self.computes and self.state.computed.missing(self.state.assigned):
                    self.place = Place.COMPUTES
                else:
                    self._exchange(out)
            case Place.TURN if self.state.take_computed() is not None:
                self._exchange(out)
            case Place.AVERAGES if self.conversation.take_averages() is not None:
                self._report(out)
                self._wait_at(Place.COMMIT, Wait.COMMIT)
            case Place.AVERAGES | Place.COMMIT:
                commit = self.state.take_commit()
                self.turning = self.turning and commit is None
                if self.midway:
                    self.state.take_up_again()
                if commit is None or not self.means:
                    return self._turn()
                self.mean = 0
                self._give(out)
            case Place.MEAN:
                return self._hears_mean(out)
            case _:
                return self._turn()
        return True

    def _hears_mean(self, out: list[Out]) -> bool:
        answer = self.conversation.take_result()
        if answer.value != self.given:
            raise Wrong(
                f"worker {self.slot} gave {self.given} and hears {answer.value}: not its mean"
            )
        self.mean += 1
        if self.mean == self.means:
            self.scheduled += 1
            return self._turn()
        self._give(out)
        return True

    def _wait_at(self, place: Place, wait: Wait) -> None:
        self.place = place
        self.conversation.wait_for(wait)

    def _give(self, out: list[Out]) -> None:
        """The script averages the next of a step's numbers."""
        # The same number at the same place of every worker's script, and nowhere else.
        self.given = 10.0 * self.state.step + self.mean
        self._do(self.conversation.give(self.given, 1.0), out)
        self._wait_at(Place.MEAN, Wait.NUMBER)

    def _turn(self) -> bool:
        """One turn of the script's loop."""
        midway, self.midway = self.midway, False
        self.turning = self.turning and self.conversation.begin_turn()
        if midway and self.state.phase is RoundPhase.LATE:
            self.place, self.conversation.wait = Place.COMPUTES, None
        elif self.turning:
            self._wait_at(Place.TURN, Wait.TURN)
        elif self.state.step >= self.steps:
            self.place = Place.ENOUGH
        else:
            self._request_work()
        return True

    def _request_work(self) -> None:
        assert self.state.forget_round() is None
        self._wait_at(Place.WORK, Wait.WORK)

    def _exchange(self, out: list[Out]) -> None:
        """Begins it, and computes ahead meanwhile, or waits for the averages."""
        assigned = self._begin(out)
        self._wait_at(Place.AVERAGES, Wait.AVERAGES)
        if self.state.computed.missing_ahead(assigned):
            self.place, self.conversation.wait = Place.AHEAD, None
        averages = self.heard.pop(assigned.key, None) if assigned.attends else None
        if averages is not None:
            self.averages = averages
            here = AveragesComplete(averages.key, averages.total_weight, averages.world_size)
            self._do(self.conversation.receive(here), out)

    def _begin(self, out: list[Out]) -> Assigned:
        assigned = self.state.assigned
        assert assigned is not None
        assert self.conversation.begin()
        self.exchanging = assigned.key
        if assigned.attends:
            if assigned.positions and not self.midway:
                self._compute()
            return assigned
        assert not self.listens
        if self.data is None:
            self.data = self._number()
            out.append(OpenData(self.data))
        local = self.local
        if self.local_steps:
            self._compute()
        else:
            local.compute(self._counted(self.state.computed.missing(assigned)), ahead=False)
        if self.quorum:
            assert self.stream is not None
            out.append(on.WorkerComputed(self.stream, assigned.key))
        positions = tuple((at, at + 1) for at in local.send())
        samples = sum(map(len, assigned.positions))
        weights = self._summed(assigned) if self.plan.grain else self.weights
        given = Contribution(assigned.key, self.slot, weights, positions, samples)
        for offset in range(self.chunks if samples else 1):
            for node, part in self._parts(assigned, given):
                out.append(Chunk(assigned.rank, assigned.world_size, offset, part, node))
        if not self.local_steps:
            local.forget()  # It sends a gradient, which moves no weights.
        return assigned

    def _summed(self, assigned: Assigned) -> Weights:
        """Adds the grains of a share to the sums that serve it; returns of which weights they are.

        In the model new grains are of the same weights as the sums that they are added to.
        """
        doubts, weights = self.conversation.doubts, self.weights
        if self.sums is not None and self.sums[0].serves(assigned, doubts):
            weights = self.sums[1]
        kept = Kept(
            parent=assigned.parent,
            epoch=assigned.epoch,
            positions=assigned.positions,
            weight=0.0,
            loss_sum=0.0,
            correct=None,
            doubts=doubts,
        )
        self.sums = kept, weights
        return weights

    def _forget_sums(self) -> None:
        """Weights have moved."""
        self.sums = None

    def _parts(
        self, assigned: Assigned, given: Contribution
    ) -> list[tuple[TreeNode | None, Contribution]]:
        """What is given, in one part, or with grains in one for each node of the share."""
        if not (self.plan.grain and given.samples):
            return [(None, given)]
        found: list[tuple[TreeNode | None, Contribution]] = []
        grains = Grains(assigned.batch, self.plan.grain)
        for node in cover(grains.of(assigned.positions), grains.count):
            own = self._counted(grains.ranges([PositionRange(node.first, node.stop)]))
            positions = tuple(each for each in given.positions if each[0] in own)
            sent = TreeNode(node.first, len(node), grains.count, self.plan.grain)
            found.append((sent, replace(given, positions=positions, samples=len(own))))
        return found

    def _counted(self, ranges: Ranges) -> tuple[int, ...]:
        """Positions of the present epoch, counted through all epochs."""
        assert self.plan.epoch_size is not None
        first = self.state.cursor.epoch * self.plan.epoch_size
        return tuple(first + at for each in ranges for at in range(each.start, each.stop))

    def _report(self, out: list[Out]) -> None:
        averages, assigned = self.averages, self.state.assigned
        assert averages is not None
        assert assigned is not None
        assert self.stream is not None
        samples = sum(len(part) for part in assigned.positions)
        ready = on.Ready(
            key=assigned.key,
            loss_sum=0.0,
            weight=float(samples),
            samples=samples,
            total_weight=averages.total_weight,
            world_size=averages.world_size,
            next=on.StandingRequest() if self.stands else None,
            node_losses=self._node_losses(assigned),
            # Of no parent: equal states then have equal digests.
            attested=attested(replace(assigned, parent=None), self.plan.grain),
            averages_digest=bytes(DIGEST_BYTES) if assigned.attests else b"",
            mean_check=mean_checked(replace(assigned, parent=None)),
        )
        self.conversation.reported()
        out.append(on.WorkerReady(self.stream, ready))

    def _node_losses(self, assigned: Assigned) -> tuple[NodeLoss, ...]:
        if not self.plan.grain:
            return ()
        grains = Grains(assigned.batch, self.plan.grain)
        nodes = cover(grains.of(assigned.positions), grains.count)
        return tuple(NodeLoss(node, float(len(node)), 0.0) for node in nodes)

    def _event_of(self, event: Down) -> Event | None:
        """What the exchange makes of a message of the reducer; other events as they are."""
        key = self.exchanging
        match event:
            case Averages() if self.listens and event.key != key:
                # It is of a round that the script has not come to, or that it needs no more.
                self.heard[event.key] = event
                return None
            case Averages():
                if event.key != key or self.place not in _EXCHANGING:
                    return None
                self.averages = event
                return AveragesComplete(event.key, event.total_weight, event.world_size)
            case Lost() if self.listens:
                self.data, self.listens = None, False
                return ListeningLost("a listening stream ended")
            case Lost():
                self.data = None
                return self._failed("DATA_STREAM_LOST") if key is not None else None
            case StaleRound() | RoundAborted() | BlockFault() if event.key != key:
                return None
            case StaleRound():
                return self._failed("STALE_ROUND", event.greatest)
            case RoundAborted():
                return self._failed("DATA_STREAM_LOST")
            case BlockFault():
                return self._failed("PROTOCOL")
        return event

    def _failed(self, kind: str, greatest: Key | None = None) -> ExchangeFailed:
        assert self.exchanging is not None
        return ExchangeFailed(key=self.exchanging, kind=kind, message="", greatest=greatest)

    def _do(  # noqa: C901 (one case an effect)
        self, effects: Sequence[Effect], out: list[Out], cause: Event | None = None
    ) -> None:
        assert self.stream is not None
        for effect in effects:
            match effect:
                case EndExchange():
                    self.exchanging = None
                case DropComputed(why):
                    self.local.drop(why, cause)
                case JoinAgain():
                    self._do(self.conversation.lost(), out)
                    # The ends of its calls end with its stream.
                    self.giving = self.coming = ()
                    out.append(CloseStream())
                    self._join(out)
                case MoveState(asked) if asked.sends and asked.beside_training:
                    given = Given(asked, self.weights, self.scheduled)
                    self.giving = (*self.giving, given)
                case MoveState(asked):
                    self.transfer = asked
                case Listen() | HearOn():
                    self._listen(out)
                case StopListening():
                    self._close_data(out)
                case EndRun():
                    self._leave(out)
                case StepDone() | AwaitAnswer() | GoOn():
                    pass
                case _:
                    out.append(_said(effect, self.stream))

    def perishes(self) -> None:
        """It is not there any more."""
        self.place, self.joining, self.giving = Place.GONE, False, ()

    def _leave(self, out: list[Out]) -> None:
        """The run is over: it says so, and ends. What it was giving does not arrive any more."""
        assert self.stream is not None
        state, head = self.state, self.state.head
        out.append(on.WorkerLeft(self.stream, on.LeaveReason.COMPLETE, "", state.step, b"", head))
        self._close_data(out)
        self.perishes()

    def _listen(self, out: list[Out]) -> None:
        assert self.stream is not None
        self._close_data(out)
        self.data, self.listens = self._number(), True
        out.append(OpenData(self.data, listens=True))
        out.append(on.ListeningReported(self.stream))

    def _close_data(self, out: list[Out]) -> None:
        if self.data is not None:
            out.append(CloseData())
        self.data, self.listens = None, False
        self.heard.clear()

    def _join(self, out: list[Out]) -> None:
        state = self.state
        self.joining = True
        self.local.rejoin()
        self.stream = self._number()
        request = on.JoinRequest(
            run_id="search",
            incarnation=self.incarnation,
            layout=LAYOUT,
            plan=self.plan,
            launch_slot=self.slot,
            head=state.head,
            cursor=state.cursor,
            step=state.step,
            held_key=state.held_key,
            greatest_term=self.greatest_term,
            halt=state.halt,
            mid_script=self.conversation.mid_script,
            spare=self.spare,
            capabilities=frozenset(
                name
                for name, has in (
                    (LEARNING, self.learns),
                    (SAME_BITS, self.plan.grain),
                    (VERIFIES, self.verifies),
                )
                if has
            ),
            arithmetic=(("processor", "any"),) if self.plan.grain else (),
        )
        out.append(Open(self.stream, request))

    def _number(self) -> Stream:
        number = Stream(self.numbers * self.workers + self.slot)
        self.numbers = Serial(self.numbers + 1)
        return number


def _said(effect: Effect, stream: Stream) -> Out:
    """An effect that is one message to the coordinator."""
    match effect:
        case RequestWork(head, leaves_epoch, voided):
            return on.WorkRequested(stream, head, leaves_epoch=leaves_epoch, voided=voided)
        case ReportState(transfer_id, head, failure):
            return on.StateReported(stream, transfer_id, head, failure)
        case SendNumber(head, sequence, value, weight):
            return on.ScalarAllReduceArrived(stream, head, sequence, value, weight)
        case ReportFault(failed):
            kind = on.FaultKind[failed.kind]
            return on.FaultReported(
                stream,
                on.Fault(
                    kind=kind,
                    key=failed.key,
                    rank=failed.rank,
                    value=failed.value,
                    greatest=failed.greatest,
                ),
            )
        case _:
            raise Wrong(f"a worker is to do what no search expects: {effect}")
