"""A worker: the real `WorkerState`, and around it what `Membership` and a script's loop do.

Each `take` is one turn of `Membership._take` and all that follows until the training thread waits
again. What it does to the world is put into `out`, in order.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from andon.protocol.messages import BlockFault, RoundAborted, StaleRound
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import events as on
from andon_trainer.core.events import (
    Assigned,
    Committed,
    ControlLost,
    ExchangeFailed,
    Halted,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from andon_trainer.core.worker_state import (
    Deed,
    EndExchange,
    JoinAgain,
    Phase,
    ReportFault,
    StepDone,
    WorkerState,
)
from scenarios.line_bench import LAYOUT
from search.messages import (
    Accepted,
    Chunk,
    CloseData,
    CloseStream,
    Down,
    Lost,
    Open,
    OpenData,
    Out,
)
from search.numbers import Incarnation, Serial, Stream, Weights
from search.weights import Averages, Contribution, Library, Wrong

__all__ = ["Place", "Worker"]


class Place(enum.Enum):
    """Where the script's thread waits."""

    FIRST = enum.auto()
    """In `Membership.join`, for weights."""
    WORK = enum.auto()
    """In `next_round`."""
    AVERAGES = enum.auto()
    """In `await_averages`."""
    COMMIT = enum.auto()
    """In `await_commit`."""
    MEAN = enum.auto()
    """In `scalar all-reduce`, after a step."""
    ENOUGH = enum.auto()
    """Past the last step: it asks for more work only if another worker waits for state."""
    GONE = enum.auto()
    """Refused: the process has ended."""


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
    numbers: Serial
    """Streams that the slot ever had."""
    means: int = 0
    """Means after each step."""
    standing: WorkerState = field(default_factory=WorkerState)
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
    scalar_all_reduce: tuple[int, float] | None = None
    """The open scalar all-reduce's sequence number, and what this worker gave."""
    scheduled: int = 0
    """How often the script moved its scheduler: once for each step, after the step's means."""

    @property
    def waits(self) -> bool:
        """Whether it takes events: not while it joins or moves state."""
        return not (self.joining or self.transfer is not None or self.place is Place.GONE)

    def start(self, out: list[Out]) -> None:
        """The process begins, or was refused a slot and tries again."""
        self._join(out)

    def take(  # noqa: C901 (one case an event)
        self, event: Down, library: Library, out: list[Out]
    ) -> None:
        """One event from the inbox."""
        standing = self.standing
        match event:
            case Committed():
                self._committed(event, library, out)
            case Voided() | Assigned() | ExchangeFailed():
                self._do(standing.receive(event), out)
            case ScalarAllReduceDone():
                self._answered(event)
            case Halted():
                news, deeds = standing.halted(event.evidence)
                if news:
                    self._do(deeds, out)
            case Resumed():
                standing.resumed()
            case TransferAsked():
                if event.sends and event.head != standing.head:
                    self._report_state(event, "this worker is at another head", out)
                else:
                    self.transfer = event
            case ControlLost():
                if event.stream == self.stream:
                    self._do([JoinAgain("lost the coordinator")], out)
            case _:
                self._take_data(event, out)
        self.settle(out)

    def accepted(self, answer: Accepted, out: list[Out]) -> Halted | Resumed | None:
        """The Join was accepted; what this puts into the inbox."""
        self.joining = False
        self.greatest_term = max(self.greatest_term, answer.term)
        if answer.in_sync and answer.head != self.standing.head:
            raise Wrong("a worker is called in sync with a head that it does not have")
        halt = self.standing.halt
        if self.data is not None:
            out.append(CloseData())
            self.data = None
        deeds = self.standing.joined(
            in_sync=answer.in_sync,
            behind=answer.behind,
            worker=self.slot,
            halted=answer.halt is not None,
        )
        self._do(deeds, out)
        for sequence in self.standing.given:
            self._give(sequence, out)
        if answer.halt is not None:
            return Halted(answer.halt)
        return None if halt is None else Resumed(halt.id)

    def join_failed(self, out: list[Out]) -> None:
        """The stream ended before an answer: it tries again."""
        self._join(out)

    def asks_on(self, out: list[Out]) -> None:
        """The script wants one step more than it had to: another worker waits for its state."""
        self.place = Place.WORK
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
            self._do(self.standing.installed(asked), out)
        self._report_state(asked, "" if donor is not None else "the other end is gone", out)
        self.settle(out)

    def settle(self, out: list[Out]) -> None:
        """The script goes on until it waits: all of it is this worker's own."""
        while self.waits and self.standing.halt is None and self._goes_on(out):
            pass
        if self.standing.phase is not Phase.HELD:
            self.averages = None

    def _goes_on(self, out: list[Out]) -> bool:
        phase = self.standing.phase
        match self.place:
            case Place.FIRST:
                return self.standing.head is not None and self._turn()
            case Place.WORK:
                return self._look_for_work(out)
            case Place.AVERAGES:
                if phase is Phase.HELD:
                    self._report(out)
                    self.place = Place.COMMIT
                    return True
                return phase is not Phase.OPEN and self._turn()
            case Place.COMMIT:
                if phase is Phase.HELD:
                    return False
                if self.standing.take_commit() is None or not self.means:
                    return self._turn()
                self.place, self.mean = Place.MEAN, 0
                return True
            case Place.MEAN:
                return self._average(out)
            case Place.ENOUGH:
                return self.standing.step < self.steps and self._turn()
            case _:
                return False

    def _average(self, out: list[Out]) -> bool:
        """The script takes a step's means, one after another, and then moves its scheduler."""
        if self.scalar_all_reduce is not None:
            return False
        if self.mean < self.means:
            # The same number at the same place of every worker's script, and nowhere else.
            given = 10.0 * self.standing.step + self.mean
            self.scalar_all_reduce = self.standing.scalar_all_reduce(given, 1.0), given
            self._give(self.scalar_all_reduce[0], out)
            return True
        self.scheduled += 1
        return self._turn()

    def _give(self, sequence: int, out: list[Out]) -> None:
        assert self.stream is not None
        value, weight, _ = self.standing.given[sequence]
        out.append(
            on.ScalarAllReduceArrived(self.stream, self.standing.head, sequence, value, weight)
        )

    def _answered(self, answer: ScalarAllReduceDone) -> None:
        if self.scalar_all_reduce is None or answer.head != self.standing.head:
            return
        if answer.sequence != self.scalar_all_reduce[0]:
            return
        _, given = self.scalar_all_reduce
        if answer.value != given:
            raise Wrong(f"worker {self.slot} gave {given} and hears {answer.value}: not its mean")
        self.scalar_all_reduce, self.mean = None, self.mean + 1

    def _turn(self) -> bool:
        """The script's loop turns round."""
        if self.standing.step >= self.steps:
            self.place = Place.ENOUGH
        else:
            assert self.standing.forget_round() is None
            self.place = Place.WORK
        return True

    def _report_state(self, asked: TransferAsked, failure: str, out: list[Out]) -> None:
        assert self.stream is not None
        head = self.standing.head
        out.append(on.StateReported(self.stream, asked.transfer_id, head, failure))

    def _look_for_work(self, out: list[Out]) -> bool:
        assert self.stream is not None
        if self.standing.must_ask(self.stream):
            out.append(on.WorkRequested(self.stream, self.standing.head))
        assigned, deeds = self.standing.take_work()
        self._do(deeds, out)
        if assigned is not None:
            self._begin(assigned, out)
            self.place = Place.AVERAGES
        return assigned is not None

    def _begin(self, assigned: Assigned, out: list[Out]) -> None:
        self.standing.begun = True
        if self.data is None:
            self.data = self._number()
            out.append(OpenData(self.data))
        self.exchanging = assigned.key
        positions = tuple((each.start, each.stop) for each in assigned.positions)
        given = Contribution(assigned.key, self.slot, self.weights, positions)
        for offset in range(self.chunks if positions else 1):
            out.append(Chunk(assigned.rank, assigned.world_size, offset, given))

    def _report(self, out: list[Out]) -> None:
        averages, assigned = self.averages, self.standing.assigned
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
        )
        out.append(on.WorkerReady(self.stream, ready))

    def _committed(self, commit: Committed, library: Library, out: list[Out]) -> None:
        before = self.standing.head
        deeds = self.standing.receive(commit)
        record = commit.record
        if self.standing.head == record.key != before:
            averages = self.averages if record.kind is RecordKind.STEP else None
            self.weights = library.applied(self.weights, record, averages)
        self._do(deeds, out)

    def _take_data(self, event: Down, out: list[Out]) -> None:
        if isinstance(event, Averages):
            here = event.key == self.exchanging and self.place is Place.AVERAGES
            if here and self.standing.phase is Phase.OPEN:
                self.averages = event
                self.standing.hold(event.key)
            return
        key, kind, greatest = self.exchanging, "DATA_STREAM_LOST", None
        if isinstance(event, Lost):
            self.data = None
        else:
            assert isinstance(event, RoundAborted | StaleRound | BlockFault)
            if event.key != key:
                return
            if isinstance(event, StaleRound):
                kind, greatest = "STALE_ROUND", event.greatest
            elif isinstance(event, BlockFault):
                kind = "PROTOCOL"
        if key is not None:
            failed = ExchangeFailed(key=key, kind=kind, message="", greatest=greatest)
            self._do(self.standing.receive(failed), out)

    def _do(self, deeds: Sequence[Deed], out: list[Out]) -> None:
        for deed in deeds:
            match deed:
                case EndExchange():
                    self.exchanging = None
                case JoinAgain():
                    self._do(self.standing.lost(), out)
                    out.append(CloseStream())
                    self._join(out)
                case ReportFault():
                    failed = deed.fault
                    seen = on.Fault(
                        kind=on.FaultKind[failed.kind], key=failed.key, greatest=failed.greatest
                    )
                    assert self.stream is not None
                    out.append(on.FaultReported(self.stream, seen))
                case StepDone():
                    pass

    def _join(self, out: list[Out]) -> None:
        standing = self.standing
        self.joining = True
        self.stream = self._number()
        request = on.JoinRequest(
            run_id="search",
            incarnation=self.incarnation,
            layout=LAYOUT,
            plan=self.plan,
            launch_slot=self.slot,
            head=standing.head,
            cursor=standing.cursor,
            step=standing.step,
            held_key=standing.held_key,
            greatest_term=self.greatest_term,
            halt=standing.halt,
            mid_script=self.place not in (Place.FIRST, Place.WORK),
        )
        out.append(Open(self.stream, request))

    def _number(self) -> Stream:
        number = Stream(self.numbers * self.workers + self.slot)
        self.numbers = Serial(self.numbers + 1)
        return number
