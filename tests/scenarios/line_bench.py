"""A test bench for the core: numbered streams, a journal in memory and a manual clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from andon.protocol.attestations import DIGEST_BYTES
from andon.protocol.capabilities import SAME_BITS
from andon.protocol.grains import Grains, NodeLoss, cover
from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.layout import Block, BlockKind, Component, Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.departures import has_last_weights
from andon_coordinator.core.detectors import WINDOW, is_spike
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import History, JournalledCheckpoint, LineSettings
from andon_coordinator.core.spikes import SpikeDecision
from andon_coordinator.core.step_results import StepResult
from scenarios.attesting import attested, mean_checked

__all__ = ["LAYOUT", "Bench", "Journal", "Peer", "make_layout"]


def make_layout(columns: int = 256) -> Layout:
    """Four blocks of one matrix each."""
    return Layout(
        tuple(
            Block(
                BlockKind.TRANSFORMER_BLOCK,
                f"blocks.{index}",
                (Component(f"blocks.{index}.attn.weight", (32, columns)),),
            )
            for index in range(4)
        )
    )


LAYOUT = make_layout()


def _term(counter: int) -> int:
    return (counter << 32) + counter


@dataclass
class Journal:
    """A journal in memory: what is durable, and what is still to be written."""

    records: list[tuple[Record, StepResult | None]] = field(default_factory=list)
    term: int = 0
    open_halt: HaltEvidence | None = None
    departures: list[do.SaveDeparture] = field(default_factory=list)
    """Since the last STEP that is durable."""
    barred: set[int | str] = field(default_factory=set)
    older_departures: int = 0
    """How many of them came before the record that was given last."""
    halted_after: int = 0
    """How many records were there, or given, before the open halt."""
    next_halt_id: int = 1
    accepted_step: int | None = None
    plan: RunPlan | None = None
    layout: Layout | None = None
    pacing: bytes = b""
    arithmetics: list[do.SaveArithmetic] = field(default_factory=list)
    spikes: list[SpikeDecision] = field(default_factory=list)
    checkpoints: list[do.NoteCheckpoint] = field(default_factory=list)
    comparison: bytes = b""
    evicted: dict[int, str] = field(default_factory=dict)
    stand: int = 0
    rolled_back_to: Key | None = None
    rolled_back: int = 0
    """How many records came before the last one that rolled the line back; 0: none did."""
    pending_records: list[do.SaveRecord] = field(default_factory=list)
    pending_terms: list[int] = field(default_factory=list)
    pending_searches: list[tuple[Key, ...]] = field(default_factory=list)

    def take(self, effect: do.Effect) -> None:  # noqa: C901 (one case an effect)
        """Takes what is to be written."""
        match effect:
            case do.SaveTerm(term):
                self.pending_terms.append(term)
            case do.SaveRecord():
                self.pending_records.append(effect)
                self.older_departures = len(self.departures)
            case do.FindAncestor(heads):
                self.pending_searches.append(heads)
            case do.SaveRun(plan, layout):
                self.plan, self.layout = plan, layout
            case do.SaveArithmetic():
                self.arithmetics.append(effect)
            case do.NoteCheckpoint():
                self.checkpoints.append(effect)
            case do.SaveSpike(made):
                self.spikes.append(made)
            case do.SaveEviction(incarnation, why, stand):
                self.evicted[incarnation], self.stand = why, stand
            case do.SaveHalt(evidence):
                self.open_halt = evidence
                self.halted_after = len(self.records) + len(self.pending_records)
                self.next_halt_id = evidence.id + 1
            case do.SaveDeparture():
                self.departures.append(effect)
                barred: tuple[int | str, ...] = effect.incarnation, effect.credential
                self.barred.update(each for each in barred if each)
            case do.SaveAnswer(halt_id, answer):
                assert halt_id < self.next_halt_id
                if self.open_halt is None or self.open_halt.id != halt_id:
                    return  # Its record, which was saved before, has closed it.
                retried = answer is HaltAnswer.RETRY and is_spike(self.open_halt)
                self.accepted_step = self.open_halt.step if retried else None
                self.open_halt = None
            case _:
                pass

    def save_record(self) -> Key:
        """Makes the oldest record durable."""
        effect = self.pending_records.pop(0)
        assert effect.record.key.term >= self.term, "an append under an older term fails"
        parent = effect.record.parent
        back = parent in self.ancestry() if effect.rolls_back else parent == self.rolled_back_to
        assert not self.records or back or parent == self.records[-1][0].key
        if effect.rolls_back:
            self.rolled_back = len(self.records)
            del self.departures[: self.older_departures]
            if not effect.by_itself:
                self.barred.clear()
        self.records.append((effect.record, effect.result))
        self.pacing = effect.pacing or self.pacing
        self.comparison = effect.comparison or self.comparison
        if len(self.records) > self.halted_after:
            self.open_halt = None  # A line that wrote a record after it had an answer.
        if effect.result is not None:
            del self.departures[: self.older_departures]
        return effect.record.key

    def find_ancestor(self) -> tuple[tuple[Key, ...], Record | None]:
        """What the oldest search finds."""
        heads = self.pending_searches.pop(0)
        history = self.ancestry()
        found = max((head for head in heads if head in history), default=None)
        return heads, history.get(found) if found is not None else None

    def ancestry(self) -> dict[Key, Record]:
        """The records of the line's history."""
        history: dict[Key, Record] = {}
        wanted: Key | None = None
        for record, _ in reversed(self.records):
            if not history or record.key == wanted:
                history[record.key], wanted = record, record.parent
        return history

    def save_term(self) -> int:
        """Makes the oldest term durable."""
        self.term = self.pending_terms.pop(0)
        return self.term

    def history(self, roll_back_to: Key | None = None) -> History:
        """What a coordinator finds when it starts, or when it is to roll back."""
        head, result = self.records[-1] if self.records else (None, None)
        before = self.records[self.rolled_back - 1][0].key if self.rolled_back else None
        last, self.rolled_back_to = head, roll_back_to
        for record, came_to in self.records:
            if record.key == roll_back_to:
                head, result = record, came_to
        roster = self._last_roster() if roll_back_to is None else ()
        step = head.step if head is not None else 0
        return History(
            spikes=tuple(self.spikes),
            evicted={each: why for each, why in self.evicted.items() if why},
            stand=self.stand,
            comparison=self.comparison,
            checkpoints=self._checkpoints(),
            roll_back=roll_back_to is not None,
            abandoned=last.key if last is not None and roll_back_to is not None else before,
            head=head,
            result=result,
            greatest_term=self.term,
            barred=frozenset(self.barred),
            halt=self.open_halt,
            next_halt_id=self.next_halt_id,
            plan=self.plan,
            layout=self.layout,
            pacing=self.pacing,
            arithmetic=self.arithmetics[0].items if self.arithmetics else None,
            arithmetics={each.worker: each.items for each in self.arithmetics},
            recent=tuple(result for _, result in self.records if result is not None)[-WINDOW:],
            accepted_step=self.accepted_step,
            last_roster=roster,
            dropped=frozenset(gone.worker for gone in self.departures if gone.dropped),
            departed={
                gone.worker: gone.reason is not None
                and gone.reason.in_order
                and has_last_weights(gone.worker, gone.step, roster, step)
                for gone in self.departures
                if roll_back_to is None
            },
        )

    def _checkpoints(self) -> tuple[JournalledCheckpoint, ...]:
        steps = {
            record.step: record.key
            for record, _ in self.records
            if record.kind is RecordKind.STEP and record.key in self.ancestry()
        }
        return tuple(
            JournalledCheckpoint(
                each.worker, "", on.Checkpoint(each.step, each.folder, steps[each.step])
            )
            for each in self.checkpoints
            if each.step in steps
        )

    def _last_roster(self) -> tuple[int, ...]:
        present = self.records[self.rolled_back :]
        steps = (record for record, _ in reversed(present) if record.kind is RecordKind.STEP)
        last = next(steps, None)
        return () if last is None else last.roster


@dataclass
class Peer:
    """One stream's worker, as far as it follows from what it was sent."""

    name: str
    head: Key | None = None
    held: Key | None = None
    assignment: do.Assignment | None = None
    transfer: do.SendTransfer | None = None
    pacing: bytes = b""
    voided: Key | None = None
    """The last round that it was told to be void."""
    dismissed: bool = False

    def hear(self, effect: do.Effect) -> None:
        """Takes in what was sent on its stream."""
        match effect:
            case do.Assign(_, assignment):
                assert not self.dismissed, f"{self.name} was sent away, and gets {assignment.key}"
                self.assignment = assignment
            case do.SendShutdown():
                self.dismissed = True
            case do.SendCommitted(_, record, _):
                self.head = record.key
                self.pacing = effect.pacing or self.pacing
            case do.SendTransfer():
                self.transfer = effect
            case do.SendVoided(_, key) | do.SendHalt(_, HaltEvidence(key=Key() as key)):
                self.voided = key
            case _:
                pass


class Bench:
    """Drives one line. Every call of `send` returns its effects."""

    def __init__(self, settings: LineSettings, plan: RunPlan) -> None:
        self.settings = settings
        self.plan = plan
        self.journal = Journal(term=_term(1))
        self.now = 0.0
        self.peers: dict[int, Peer] = {}
        self._streams = count(1)
        self._bits = count(1)
        self.line = self._start(History())

    def _start(self, history: History) -> LineCore:
        return LineCore(
            self.settings,
            term=self.journal.term,
            history=history,
            random_bits=lambda: next(self._bits),
        )

    def restart(self, *, journal_kept: bool = True, roll_back_to: Key | None = None) -> None:
        """The coordinator dies and comes back; what was not durable yet is lost."""
        term = _term((self.journal.term >> 32) + 1)
        history = self.journal.history(roll_back_to) if journal_kept else History()
        if not journal_kept:
            self.journal = Journal()
        self.journal.pending_records.clear()
        self.journal.pending_terms.clear()
        self.journal.pending_searches.clear()
        self.journal.halted_after = min(self.journal.halted_after, len(self.journal.records))
        self.journal.term = term
        self.peers.clear()
        self.line = self._start(history)

    def send(self, event: on.Event) -> list[do.Effect]:
        """Gives the line one event."""
        effects = self.line.receive(event, self.now, wall=1.0)
        for effect in effects:
            self.journal.take(effect)
            stream = getattr(effect, "stream", None)
            if stream in self.peers:
                self.peers[stream].hear(effect)
        return effects

    def join(self, name: str, request: on.JoinRequest) -> tuple[int, list[do.Effect]]:
        """Opens a stream; returns its number."""
        stream = next(self._streams)
        self.peers[stream] = Peer(name, request.head, request.held_key)
        return stream, self.send(on.WorkerJoined(stream, request))

    def request(self, slot: int | None, incarnation: int) -> on.JoinRequest:
        """A fresh worker's Join."""
        return on.JoinRequest(
            run_id=self.settings.run_id,
            incarnation=incarnation,
            layout=LAYOUT,
            plan=self.plan,
            launch_slot=slot,
            capabilities=frozenset({SAME_BITS} if self.plan.grain else ()),
            arithmetic=(("processor", "x"),) if self.plan.grain else (),
        )

    def rejoin(self, stream: int, slot: int, incarnation: int) -> on.JoinRequest:
        """The Join of the worker that was on a stream, as it remembers itself."""
        peer = self.peers[stream]
        step, cursor = self.where(peer.head)
        return replace(
            self.request(slot, incarnation),
            head=peer.head,
            held_key=peer.held,
            step=step,
            cursor=cursor,
            greatest_term=self.journal.term,
            pacing=peer.pacing,
        )

    def where(self, head: Key | None) -> tuple[int, Cursor]:
        """Step and cursor of a head that the journal knows."""
        for record, _ in self.journal.records:
            if record.key == head:
                return record.step, record.cursor
        return 0, Cursor(0, 0)

    def ready(self, stream: int, *, loss: float = 1.0, weight: float | None = None) -> on.Ready:
        """A right report on the stream's last assignment."""
        assignment = self.peers[stream].assignment
        assert assignment is not None
        samples = sum(len(part) for part in assignment.positions)
        weight = float(samples) if weight is None else weight
        return on.Ready(
            key=assignment.key,
            loss_sum=loss * weight,
            weight=weight,
            samples=samples,
            total_weight=float(self._taken(assignment)),
            world_size=len(assignment.roster),
            node_losses=self._node_losses(assignment, loss),
            attested=attested(assignment, self.plan.grain),
            averages_digest=bytes(DIGEST_BYTES) if assignment.attests else b"",
            mean_check=mean_checked(assignment),
            digest=bytes(32) if assignment.wants_digest and assignment.attests else b"",
            digest_head=assignment.parent,
        )

    def _taken(self, assignment: do.Assignment) -> int:
        """How many positions a round's roster has; with a quorum, not all of its batch."""
        if self.settings.policy.quorum is None:
            return len(assignment.batch)
        members = {
            work.rank: work.positions
            for work in (peer.assignment for peer in self.peers.values())
            if work is not None and work.key == assignment.key and not work.attends
        }
        return sum(len(part) for share in members.values() for part in share)

    def _node_losses(self, assignment: do.Assignment, loss: float) -> tuple[NodeLoss, ...]:
        """Every sample has the same loss and the weight 1."""
        if not self.plan.grain:
            return ()
        grains, losses = Grains(assignment.batch, self.plan.grain), []
        for node in cover(grains.of(assignment.positions), grains.count):
            samples = sum(map(len, grains.ranges([PositionRange(node.first, node.stop)])))
            losses.append(NodeLoss(node, float(samples), loss * samples))
        return tuple(losses)
