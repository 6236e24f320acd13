"""The world: the cores, and what their effects do to everything else.

What a core does depends only on the core and the event, so it is computed once for each pair
(`_memo`), however many states meet it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from andon.protocol.grains import Node
from andon.protocol.records import Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.transport.outgoing import CommitAndAssign, together
from andon_reducer.core.rounds import Rounds
from andon_trainer.core.events import ControlLost
from search import coordinator, reducer
from search.coordinator import Journal
from search.copying import copied
from search.messages import (
    Checkpoint,
    Chunk,
    CloseData,
    CloseStream,
    Lost,
    Open,
    OpenData,
    Out,
    Refused,
)
from search.numbers import Incarnation, Serial, Stream
from search.parts import Mark, Parts, renamed
from search.state import Bounds, Draft, Queue, State
from search.weights import WRONG_DIGEST, Library, Wrong
from search.worker import Place, Worker

__all__ = ["World"]


class World:
    """Makes states from states, within bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.parts = Parts()
        size = bounds.windows * bounds.workers or 1000
        self.library = Library(size, by_nodes=bounds.grains)
        self.plan = RunPlan(
            global_batch=bounds.workers,
            dataset_size=size,
            grain=int(bounds.grains),
            tree=int(bounds.grains),
        )
        self.settings = coordinator.settings(bounds)
        self._memo: dict[object, Any] = {}

    def first(self) -> State:
        """Nobody has joined yet."""
        journal = Journal(term=coordinator.term(1))
        line = coordinator.start(self.settings, journal, journal.term, self.plan)
        none: list[Queue] = [()] * self.bounds.workers
        core, durable = self.parts.number(line), self.parts.number(journal)
        sums = self.parts.number(reducer.start())
        faults = self.bounds.faults
        draft = Draft(faults, core, durable, sums, [*range(len(none))], {}, none, {}, none)
        draft = Draft.of(draft.state())
        for slot in range(self.bounds.workers):
            self.spawn(draft, slot, Serial(0))
        return draft.state()

    # ------------------------------------------------------------------ what a state holds

    def line(self, state: State | Draft) -> LineCore:
        """The coordinator's core."""
        line: LineCore = self.parts.objects[state.coordinator]
        return line

    def core(self, state: State | Draft) -> CoreState:
        """The core's state."""
        return coordinator.core_of(self.line(state))

    def journal(self, state: State | Draft) -> Journal:
        """What is durable."""
        journal: Journal = self.parts.objects[state.journal]
        return journal

    def worker(self, state: State | Draft, slot: int) -> Worker:
        """One worker."""
        worker: Worker = self.parts.objects[state.workers[slot]]
        return worker

    def key(self, state: State) -> int:
        """A key that is equal for states that differ only in their numbering."""
        marks_of, plain_of = self.parts.marks, self.parts.plain
        plain: list[object] = [state.faults]
        marks: list[Mark] = []
        kept = () if state.checkpoint is None else (state.checkpoint,)
        for part in (state.coordinator, state.journal, state.reducer, *state.workers, *kept):
            plain.append(plain_of[part])
            marks += marks_of[part]
        for streams in (state.ups, state.data_ups):
            for stream, queue in streams:
                plain.append("stream")
                marks.append((2, stream, 0))
                for part in queue:
                    plain.append(plain_of[part])
                    marks += marks_of[part]
            plain.append("end")
        for queues in (state.downs, state.data_downs):
            for queue in queues:
                plain.append("queue")
                for part in queue:
                    plain.append(plain_of[part])
                    marks += marks_of[part]
        return hash((tuple(plain), renamed(marks)))

    # ------------------------------------------------------------------ telling a core

    def tell(self, draft: Draft, what: int | tuple[object, ...]) -> None:
        """The coordinator takes an event, by its part's number, or a deadline passes."""
        told = draft.coordinator, what
        outcome = self._remembered(("line", *told), lambda: self._line_after(*told))
        draft.coordinator, effects = outcome
        for effect in effects:
            self._route(draft, effect)

    def reduce(self, draft: Draft, stream: Stream, message: int) -> None:
        """The reducer takes a message, or a stream's end."""

        def after() -> tuple[int, list[tuple[int, int]]]:
            rounds: Rounds = copied(self.parts.objects[draft.reducer])
            part = self.parts.objects[message]
            replies = reducer.take(rounds, stream, part, self.bounds.chunks)
            return self.parts.number(rounds), [(to, self.parts.number(m)) for to, m in replies]

        outcome = self._remembered(("reducer", draft.reducer, int(stream), message), after)
        draft.reducer, replies = outcome
        for to, reply in replies:
            slot = to % self.bounds.workers
            if self.worker(draft, slot).data == to and not self.over(draft.data_downs[slot]):
                draft.data_downs[slot] += (reply,)

    def turn(
        self, draft: Draft, slot: int, memo: tuple[object, ...], act: Callable[..., object]
    ) -> tuple[Out, ...]:
        """A worker's turn; what it does is still to be done, with `act_out`."""

        def after() -> tuple[int, tuple[Out, ...], Queue]:
            worker: Worker = copied(self.worker(draft, slot))
            out: list[Out] = []
            note = act(worker, out)
            inbox = () if note is None else (self.parts.number(note),)
            return self.parts.number(worker), tuple(out), inbox

        outcome = self._remembered(("worker", draft.workers[slot], *memo), after)
        draft.workers[slot], out, inbox = outcome
        draft.downs[slot] = (*inbox, *draft.downs[slot])
        self._keep(draft, self.worker(draft, slot))
        return tuple(out)

    def checkpoint(self, state: State | Draft) -> Checkpoint | None:
        """The checkpoint that was written last."""
        if state.checkpoint is None:
            return None
        checkpoint: Checkpoint = self.parts.objects[state.checkpoint]
        return checkpoint

    def _keep(self, draft: Draft, worker: Worker) -> None:
        """A worker that waits between two steps has written its checkpoint, if it was due."""
        head, between = worker.state.head, worker.place in (Place.WORK, Place.ENOUGH)
        if head is None or not between or worker.state.step != self.bounds.checkpoint:
            return
        last = self.checkpoint(draft)
        if last is None or head > last.head:
            state = worker.state
            draft.checkpoint = self.numbered(
                Checkpoint(head, state.cursor, state.step, worker.weights, worker.scheduled)
            )

    def act_out(self, draft: Draft, slot: int, out: tuple[Out, ...], sent: int = 0) -> None:
        """Does what a worker's turn came to; of a stream that it closes, `sent` messages arrive."""
        for each in out:
            match each:
                case CloseStream():
                    self._hang_up(draft, slot, sent)
                case Open(stream, request):
                    draft.ups[stream] = (self.parts.number(on.WorkerJoined(stream, request)),)
                    draft.downs[slot] = ()
                case OpenData(stream, listens):
                    self._open_data(draft, slot, stream, listens=listens)
                case CloseData():
                    self.end_data(draft, slot, None)
                case Chunk():
                    data = self.worker(draft, slot).data
                    if data in draft.data_ups and not self.over(draft.data_ups[data]):
                        draft.data_ups[data] += (self.numbered(each),)
                case _:
                    stream = Stream(each.stream)
                    up = draft.ups.get(stream)
                    if up is not None and not self.over(up):
                        draft.ups[stream] = (*up, self.parts.number(each))

    def write(self, draft: Draft) -> None:
        """The journal makes the first pending change durable, and reports it."""

        def after() -> tuple[int, int | None]:
            journal, save = self.journal(draft).written()
            said: int | None = None
            match save:
                case do.SaveRecord(record):
                    said = self.parts.number(on.RecordSaved(record.key))
                case do.SaveTerm(term):
                    said = self.parts.number(on.TermSaved(term))
                case do.FindAncestor(heads):
                    found = on.AncestorFound(heads, journal.find_ancestor(heads))
                    said = self.parts.number(found)
            return self.parts.number(journal), said

        draft.journal, said = self._remembered(("write", draft.journal), after)
        if said is not None:
            self.tell(draft, said)

    def numbered(self, part: object) -> int:
        """The number of a small frozen part."""
        number: int = self._remembered(part, lambda: self.parts.number(part))
        return number

    # ------------------------------------------------------------------ streams and processes

    def spawn(
        self, draft: Draft, slot: int, numbers: Serial, checkpoint: Checkpoint | None = None
    ) -> None:
        """A new process takes a slot, with a checkpoint or fresh."""
        process = Incarnation(numbers * self.bounds.workers + slot)
        later = numbers > 0 or slot >= self.bounds.expected
        worker = Worker(
            slot=slot,
            workers=self.bounds.workers,
            steps=self.bounds.steps,
            plan=self.plan,
            chunks=self.bounds.chunks,
            incarnation=process,
            weights=self.library.initial(process),
            numbers=Serial(numbers + 1),
            means=self.bounds.means,
            local_steps=self.bounds.local or self.bounds.overlap,
            stands=self.bounds.standing,
            computes=self.bounds.computes or self.bounds.quorum,
            quorum=self.bounds.quorum,
            learns=self.bounds.learns or self.bounds.quorum,
            spare=self.bounds.spares and later,
            verifies=self.bounds.verifies,
            ends=self.bounds.ends,
            applied=self.library.applied,
        )
        if checkpoint is not None:
            worker.load(checkpoint)
        out: list[Out] = []
        worker.start(out)
        draft.workers[slot] = self.parts.number(worker)
        draft.downs[slot] = draft.data_downs[slot] = ()
        self.act_out(draft, slot, tuple(out))

    def end_control(self, draft: Draft, slot: int, sent: int, *, gone: bool) -> None:
        """A control stream ends; the first `sent` messages of it still arrive before its end."""
        stream = self.worker(draft, slot).stream
        if stream in draft.ups and not self.over(draft.ups[stream]):
            end = self.numbered(on.WorkerStreamEnded(stream, gone))
            draft.ups[stream] = (*draft.ups[stream][:sent], end)

    def lose_control(self, draft: Draft, slot: int, kept: int) -> None:
        """A worker's end of its control stream: `kept` messages arrived before the loss."""
        stream = self.worker(draft, slot).stream
        assert stream is not None
        lost = self.numbered(ControlLost(stream, "the stream broke"))
        if not self.over(draft.downs[slot]):
            draft.downs[slot] = (*draft.downs[slot][:kept], lost)

    def end_data(self, draft: Draft, slot: int, sent: int | None) -> None:
        """A worker's data stream ends at both ends; None: all that was sent still arrives."""
        for stream, queue in draft.data_ups.items():
            if stream % self.bounds.workers == slot and not self.over(queue):
                draft.data_ups[stream] = (*queue[:sent], self.numbered(Lost()))
        draft.data_downs[slot] = ()

    def _hang_up(self, draft: Draft, slot: int, sent: int) -> None:
        """A worker closes its control stream; messages that it did not take yet are dropped."""
        for stream, queue in draft.ups.items():
            if stream % self.bounds.workers == slot and not self.over(queue):
                end = self.numbered(on.WorkerStreamEnded(stream))
                draft.ups[stream] = (*queue[:sent], end)

    def _open_data(self, draft: Draft, slot: int, stream: Stream, *, listens: bool) -> None:
        def after() -> int:
            rounds: Rounds = copied(self.parts.objects[draft.reducer])
            reducer.open_stream(rounds, stream, slot, listens=listens)
            return self.parts.number(rounds)

        draft.reducer = self._remembered(("open", draft.reducer, int(stream), listens), after)
        draft.data_ups[stream] = ()
        draft.data_downs[slot] = ()

    def over(self, queue: Queue) -> bool:
        """Whether a stream's last message is its end."""
        ends = (on.WorkerStreamEnded, ControlLost, Lost, Refused)
        return bool(queue) and isinstance(self.parts.objects[queue[-1]], ends)

    # ------------------------------------------------------------------ the coordinator's effects

    def _line_after(
        self, core: int, what: int | tuple[object, ...]
    ) -> tuple[int, list[tuple[object, ...]]]:
        line: LineCore = copied(self.parts.objects[core])
        if isinstance(what, int):
            effects = line.receive(self.parts.objects[what], 0.0)
        else:
            effects = coordinator.fire(line, (str(what[1]), int(str(what[2]))))
        after = coordinator.core_of(line)
        after.effects = []
        _check_notices(after, effects)
        routed: list[tuple[object, ...]] = []
        for effect in together(effects):
            match effect:
                case (
                    do.SaveTerm()
                    | do.SaveRecord()
                    | do.SaveHalt()
                    | do.SaveAnswer()
                    | do.FindAncestor()
                    | do.SaveVerdict()
                ):
                    routed.append(("save", effect, self.parts.number(effect)))
                case do.SaveRun():
                    routed.append(("run",))
                case do.EndSession(worker):
                    routed.append(("end session", worker))
                case _:
                    message = coordinator.heard(effect, after.keys.term)
                    if message is not None:
                        stream = getattr(effect, "stream", None)
                        routed.append(("send", stream, self.parts.number(message), effect))
        return self.parts.number(line), routed

    def _route(self, draft: Draft, effect: tuple[Any, ...]) -> None:
        match effect:
            case ("save", do.SaveVerdict() as verdict, _):
                self._check_verdict(verdict)
            case ("save", save, part):
                self._check_saved(draft, save)
                draft.journal = self._remembered(
                    ("save", draft.journal, part),
                    lambda: self.parts.number(self.journal(draft).given(save)),
                )
            case ("run",):
                draft.journal = self._remembered(
                    ("run", draft.journal),
                    lambda: self.parts.number(self.journal(draft).knows()),
                )
            case ("end session", slot):
                worker = self.worker(draft, slot)
                if worker.data is not None and not self.over(draft.data_downs[slot]):
                    self.end_data(draft, slot, None)
                    draft.data_downs[slot] = (self.numbered(Lost()),)
            case ("send", stream, message, sent):
                self._check_sent(draft, sent)
                self._check_went_on(draft, sent)
                slot = stream % self.bounds.workers
                mine = self.worker(draft, slot).stream == stream
                if isinstance(sent, do.CloseStream | do.RefuseJoin):
                    draft.ups.pop(stream, None)
                if mine and not self.over(draft.downs[slot]):
                    draft.downs[slot] += (message,)

    def _check_saved(self, draft: Draft, save: object) -> None:
        """A step is committed only while every member of its roster holds all averages.

        And no step is given up while the coordinator has a worker that holds it.
        """
        head = self.core(draft).chain.head
        if isinstance(save, do.SaveRecord) and save.rolls_back:
            held = [each.worker for each in self.core(draft).members.in_sync(head)]
            if held:
                raise Wrong(f"rule 12: the line goes back, and {held} hold its head")
        if not isinstance(save, do.SaveRecord) or save.record.kind is not RecordKind.STEP:
            return
        key = save.record.key
        for slot in save.record.roster:
            worker_state = self.worker(draft, slot).state
            if (
                worker_state.head is not None
                and worker_state.held_key != key
                and worker_state.head < key
            ):
                raise Wrong(f"C-COMMIT-001: {key} is committed, and worker {slot} is not ready")

        self._check_agreed(save)
        for slot in save.record.roster:
            if self.worker(draft, slot).heard_otherwise == key:
                raise Wrong(
                    f"section 37: {key} is committed, and worker {slot} did not get all sums as "
                    "they were sent"
                )
        self._check_late(draft, save.record)

    def _check_late(self, draft: Draft, record: Record) -> None:
        """Nobody is left out of more records in a row than the policy says."""
        if self.bounds.faults:
            return  # Some were away, and that is no lateness.
        before = [each for each, _ in self.journal(draft).records if each.kind is RecordKind.STEP]
        most = self.core(draft).settings.policy.max_late
        for member in self.core(draft).members.late():
            last = [record, *reversed(before)][: most + 1]
            if len(last) > most and not any(member.worker in each.roster for each in last):
                raise Wrong(f"worker {member.worker} is left out of {len(last)} records in a row")

    def _check_agreed(self, save: do.SaveRecord) -> None:
        """No step is committed of which two workers attested different results."""
        told: dict[Node, bytes] = {}
        for worker, each in save.proved.attested if save.proved is not None else ():
            if told.setdefault(each.node, each.digest) != each.digest:
                raise Wrong(
                    f"section 37: {save.record.key} is committed, and worker {worker} differs in "
                    f"{each.node}"
                )

    def _check_verdict(self, verdict: do.SaveVerdict) -> None:
        """Nobody is convicted who never attested anything wrong, nor a reducer: they are right."""
        if "added wrong" in verdict.text:
            raise Wrong("section 37: a reducer is convicted, and was right")
        if verdict.worker is None:
            return
        given = [each for each in json.loads(verdict.evidence) if each["worker"] == verdict.worker]
        told = [each for one in given for digests in one["digests"].values() for each in digests]
        if not any(each.startswith(WRONG_DIGEST.hex()) for each in told):
            raise Wrong(f"section 37: worker {verdict.worker} is convicted, and was right")

    def _check_sent(self, draft: Draft, effect: object) -> None:
        """Only what is durable is announced, or used."""
        if isinstance(effect, CommitAndAssign):
            self._check_sent(draft, effect.committed)
            self._check_sent(draft, effect.assign)
            return
        journal = self.journal(draft)
        if isinstance(effect, do.SendCommitted):
            durable = [record.key for record, _ in journal.records]
            if effect.record.key not in durable:
                raise Wrong(f"record {effect.record.key} is announced, and is not durable")
        elif isinstance(effect, do.SendTransfer) and effect.role is TransferRole.SEND:
            # To a learner it sends what lies beneath that, and goes on with it.
            if not effect.beside_training:
                self._check_pipe(draft, effect)
        elif isinstance(effect, do.Assign) and effect.assignment.key.term != journal.term:
            raise Wrong(f"key {effect.assignment.key} is used, and its term is not durable")
        elif isinstance(effect, do.Assign):
            saving = [
                each.record.key for each in journal.pending if isinstance(each, do.SaveRecord)
            ]
            if effect.assignment.parent in saving:
                raise Wrong(f"work is assigned on {saving[0]}, which is not durable")

    def _check_went_on(self, draft: Draft, effect: object) -> None:
        """A window goes on without somebody only if another one has computed."""
        slots = range(self.bounds.workers)
        done = (self.worker(draft, slot).local.change for slot in slots)
        # After a fault the one that has said so may be gone.
        whole = draft.faults == self.bounds.faults
        if isinstance(effect, do.SendLate) and whole and not any(done):
            raise Wrong(f"{effect.key} goes on without a worker, and nobody has computed")

    def _check_pipe(self, draft: Draft, effect: do.SendTransfer) -> None:
        """No sender has anything computed ahead, unless too few are in sync to empty the pipe."""
        core, slot = self.core(draft), effect.stream % self.bounds.workers
        sender, head = self.worker(draft, slot), core.chain.head
        # A worker that is about to hear of a record, or that joined again, has it all the same.
        if sender.state.head != head or sender.local.rejoined:
            return
        enough = len(core.members.in_sync(head)) >= self.bounds.min_workers
        ahead = [*sender.local.change, *sender.local.left_over]
        if ahead and enough:
            raise Wrong(f"worker {slot} sends state with {ahead} in the pipe")

    def _remembered(self, memo: object, after: Callable[[], Any]) -> Any:
        found = self._memo.get(memo)
        if found is None:
            try:
                found = after()
            except AssertionError as error:
                found = Wrong(f"a core contradicts itself: {error}")
            except Wrong as wrong:
                found = wrong
            self._memo[memo] = found
        if isinstance(found, Wrong):
            raise found
        return found


def _takes_state_along(core: CoreState, worker: int) -> bool:
    """Whether a worker that left was the last that held the state, and somebody here lacks it."""
    head, members = core.chain.head, core.members
    gone = members.get(worker)
    if gone is None or gone.head != head or not core.chain.step or core.stop_reason:
        return False
    return not members.in_sync_count(head) and bool(members.behind(head) or members.learners())


def _check_notices(core: CoreState, effects: Sequence[do.Effect]) -> None:
    """A worker that gave notice gets no new positions, and no round loses its contribution."""
    for effect in effects:
        if isinstance(effect, do.SendShutdown) and "(notice: " in effect.message:
            if any(isinstance(each, do.SendVoided) for each in effects):
                raise Wrong("a worker that gave notice is sent away from its round")
            if _takes_state_along(core, core.released[effect.stream]):
                raise Wrong("the last worker that holds the state is sent away")
        elif isinstance(effect, do.Assign):
            member, work = core.members.on_stream(effect.stream), effect.assignment
            policy = core.settings.policy
            # It may bring what it has computed ahead, or what it has for a window with a quorum.
            brings = (policy.overlap and not work.ahead) or policy.quorum is not None
            if member is not None and member.notice and not brings:
                raise Wrong(f"worker {member.worker} gave notice, and is dealt {work.key}")
