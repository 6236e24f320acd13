"""Transcripts of the line: what happened, then every effect.

A transcript is a text file. Lines that begin with `#` are prose. `settings` comes first; each
other command, which begins with `> `, is followed by all its effects, one a line, compared
exactly; `=` shows the line's state after it changed. `ANDON_REWRITE_TRANSCRIPTS=1 pytest ...`
rewrites the effects: read the diff.

A worker is named as in `join w0`; its streams are shown as `w0`, then `w0#2`, and so on. Keys are
shown as term/round: the first coordinator's term is 1, the next one's 2. What a command leaves out
is what a worker that does nothing wrong would say; see the `_Commands` methods for what can be
given.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from andon.protocol.arithmetic import Arithmetic, ArithmeticRule, in_order
from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.capabilities import OVERFLOW
from andon.protocol.encoding import Encoding
from andon.protocol.grains import Node, NodeLoss
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.limits import CHUNK_ELEMENTS
from andon.protocol.records import Cursor, Key, PositionRange, Record
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, Policy, RunPlan, Topology
from andon.protocol.scalars import Scalar
from andon.protocol.schedules import Schedule
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.cadence import CadenceRules
from andon_coordinator.core.eviction import EvictionRules
from andon_coordinator.core.settings import (
    LearningRateScaling,
    LineSettings,
    PacingSettings,
    VerifySettings,
)
from andon_coordinator.core.spikes import SpikeAction
from andon_coordinator.core.step_results import StepResult
from scenarios import transcript
from scenarios.attesting import attested, mean_checked, nodes_apart
from scenarios.line_bench import Bench, make_layout
from scenarios.transcript import Options, options_of

__all__ = ["play"]

_FIRST_OF_REDUCERS = 1000
"""Numbers of reducers' streams: no worker's stream has them."""


def play(text: str) -> str:
    """The transcript with its effects as they are now."""
    return transcript.play(text, _Commands)


class _Commands:
    def __init__(self, options: Options) -> None:
        plan = RunPlan(
            global_batch=int(options.get("batch", "4")),
            dataset_size=_number(options.get("dataset", "8")),
            total_steps=_number(options.get("total_steps", "")),
            total_epochs=_number(options.get("total_epochs", "")),
            data_digest=options.get("data", "") * 32,
            drop_last="drop_last" in options,
            sparse="sparse" in options,
            grain=int(options.get("grain", "0")),
            tree=int("grain" in options),
        )
        workers = int(options.get("expect", "2"))
        self.settings = LineSettings(
            run_id="7f3a",
            expect_workers=workers,
            min_workers=int(options.get("min", str(workers))),
            max_workers=int(options.get("max", "4")),
            expect_reducers=int(options.get("reducers", "1")),
            own_reducer=options.get("own", "yes") == "yes",
            workers_may_stop=options.get("may_stop", "workers") == "workers",
            policy=Policy(
                chunk_elements=int(options.get("chunk", str(CHUNK_ELEMENTS))),
                max_steps=_number(options.get("max_steps", "")),
                gradient_norm="norm_spike" in options,
                own_gradient_norm="worker_norm" in options,
                local_steps=int(options.get("local_steps", "0")),
                overlap="overlap" in options,
                quorum=_real(options.get("quorum", "")),
                max_late=int(options.get("max_late", "8")),
                fragments=int(options.get("fragments", "1")),
                topology=Topology.RING if "ring" in options else Topology.STAR,
                encoding=Encoding.of(options.get("encoding", "float32")),
            ),
            liveness=Liveness(lease_s=3.0),
            forming_timeout_s=_real(options.get("forming_timeout", "")),
            straggler_timeout_s=_real(options.get("straggler_timeout", "")),
            grace_s=_real(options.get("grace", "")),
            host=options.get("host", ""),
            token=options.get("token", "").encode(),
            capabilities=frozenset(filter(None, options.get("needs", "").split(","))),
            loss_spike=_real(options.get("loss_spike", "")),
            gradient_norm_spike=_real(options.get("norm_spike", "")),
            worker_gradient_norm=_real(options.get("worker_norm", "")),
            pacing=_pacing(options),
            on_spike=SpikeAction(options.get("on_spike", "halt")),
            same_bits="same_bits" in options,
            arithmetic=ArithmeticRule(options.get("arithmetic", "require")),
            verify=VerifySettings(
                fraction=float(options.get("verify", "0")),
                drops="drops" in options,
                key=b"a key",
            ),
        )
        self.bench = Bench(self.settings, plan)
        self.names: dict[str, int] = {}
        self.reducers: dict[str, int] = {}
        self.reducer_streams = count(_FIRST_OF_REDUCERS)
        self.labels: dict[int, str] = {}
        self.state = self.bench.line.state

    def run(self, line: str) -> Iterator[str]:
        verb, *words = shlex.split(line)
        plain = list(takewhile(lambda word: "=" not in word, words))
        command: Callable[[list[str], Options], list[do.Effect]]
        command = getattr(self, verb.replace("-", "_"))
        for effect in command(plain, options_of(words[len(plain) :])):
            yield self._shown(effect)
        if self.bench.line.state is not self.state:
            self.state = self.bench.line.state
            yield f"= {self.state.name}"

    def tick(self, words: list[str], options: Options) -> list[do.Effect]:
        self.bench.now = float(words[0])
        return self.bench.send(on.TimePassed(float(options.get("late", "0"))))

    def register(self, words: list[str], options: Options) -> list[do.Effect]:
        """A reducer, named by its address, proved itself."""
        stream = self.reducers[words[0]] = next(self.reducer_streams)
        return self.bench.send(on.ReducerRegistered(stream, words[0]))

    def unlist(self, words: list[str], options: Options) -> list[do.Effect]:
        """A reducer's stream ended."""
        return self.bench.send(on.ReducerLost(self.reducers[words[0]]))

    def join(self, words: list[str], options: Options) -> list[do.Effect]:
        name = words[0]
        slot = options.get("slot", name[1:])
        request = self.bench.request(
            int(slot) if slot != "none" else None, int(options.get("process", name[1:]))
        )
        if name in self.names and "process" not in options:
            request = self.bench.rejoin(
                self.names[name], request.launch_slot or 0, request.incarnation
            )
        plan = request.plan
        given: dict[str, Any] = {
            part: int(options[part])
            for part in ("dataset_size", "global_batch", "seed", "total_steps", "grain", "tree")
            if part in options
        }
        if "data" in options:
            given["data_digest"] = options["data"] * 32
        plan = replace(plan, **given)
        request = replace(
            request,
            plan=plan,
            run_id=options.get("run", request.run_id),
            protocol_version=int(options.get("version", "1")),
            token=options.get("token", "").encode(),
            layout=make_layout(int(options.get("columns", "256"))),
            head=_key(options["head"]) if "head" in options else request.head,
            held_key=_key(options["held"]) if "held" in options else request.held_key,
            step=int(options.get("step", str(request.step))),
            cursor=_cursor(options["cursor"]) if "cursor" in options else request.cursor,
            greatest_term=int(options.get("term", "0")) << 32 or request.greatest_term,
            halt=self._halt(options),
            mid_script="mid_script" in options,
            node_id=options.get("host", request.node_id),
            devices=(on.Device("cpu", options["device"]),) if "device" in options else (),
            capabilities=_capabilities(options),
            speed_hint=_real(options.get("hint", "")),
            pacing=request.pacing,
            spare="spare" in (*words, *options),
            arithmetic=_arithmetic(options["arithmetic"])
            if "arithmetic" in options
            else request.arithmetic,
            checkpoints=on.CheckpointPlan(
                int(options["every"]), "/runs", int(options.get("keep", "3"))
            )
            if "every" in options
            else None,
        )
        joins = sum(label.split("#")[0] == name for label in self.labels.values()) + 1
        self.labels[self._next_stream()] = name if joins == 1 else f"{name}#{joins}"
        stream, effects = self.bench.join(name, request)
        self.names[name] = stream
        return effects

    def _halt(self, options: Options) -> HaltEvidence | None:
        """The halt that the journal has open; with an id, one that nobody saw."""
        if options.get("halt"):
            return HaltEvidence(id=int(options["halt"]), reason=HaltReason.OPERATOR, step=10**6)
        return self.bench.journal.open_halt if "halt" in options else None

    def ask(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        peer = self.bench.peers[stream]
        head = _key(options["head"]) if "head" in options else peer.head
        left = "leaves" in words
        wrote = _number(options.get("wrote", ""))
        last = self._checkpoint(wrote, options)
        place = options.get("at", "")
        begun = int(options.get("writes", "0"))
        asked = on.WorkRequested(
            stream,
            head,
            place,
            leaves_epoch=left,
            checkpoint=last,
            checkpoint_begun=begun,
            voided=_key(options["voided"]) if "voided" in options else peer.voided,
        )
        return self.bench.send(asked)

    def _checkpoint(self, step: int | None, options: Options) -> on.Checkpoint | None:
        """The one of this step; `wrote_at` is the record that it was written at."""
        if step is None:
            return None
        head = _key(options["wrote_at"]) if "wrote_at" in options else None
        return on.Checkpoint(step, f"/runs/step-{step}", head)

    def ready(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        given, next_ = options.get("weight"), None
        if "next" in words or "next" in options:
            wrote = _number(options.get("wrote", ""))
            last = self._checkpoint(wrote, options)
            begun = int(options.get("writes", "0"))
            next_ = on.StandingRequest(checkpoint=last, checkpoint_begun=begun)
        report = self.bench.ready(
            stream,
            loss=float(options.get("loss", "1.0")),
            weight=float(given) if given is not None else None,
        )
        if "nodes" in options:
            report = replace(report, node_losses=_node_losses(options["nodes"]))
        report = replace(
            report,
            key=(_key(options["key"]) if "key" in options else None) or report.key,
            samples=int(options.get("samples", str(report.samples))),
            total_weight=float(options.get("total", str(report.total_weight))),
            world_size=int(options.get("world", str(report.world_size))),
            digest=bytes.fromhex(options.get("digest", report.digest.hex())),
            digest_head=self.bench.peers[stream].head,
            digest_prefixes=bytes.fromhex(options.get("prefixes", "")),
            attested=self._attested(stream, options),
            mean_check=self._mean_check(stream, options),
            apart=self._nodes_apart(stream, options),
            averages_digest=bytes.fromhex(options.get("averages", report.averages_digest.hex())),
            end_of_data="end_of_data" in options,
            stop_reason=options.get("stop", ""),
            gradient_norm=_real(options.get("norm", "")),
            own_gradient_norm=_real(options.get("own_norm", "")),
            overflow="overflow" in options,
            digest_base_hashed="hashed" in options,
            next=next_,
            timings=self._timings(report.samples, options),
        )
        self.bench.peers[stream].held = report.key
        return self.bench.send(on.WorkerReady(stream, report))

    def _attested(self, stream: int, options: Options) -> tuple[Attestation, ...]:
        """`wrong=3,0+2:x`: grain 3 is wrong, and the sum of grains 0 and 1 in another way."""
        work = self.bench.peers[stream].assignment
        assert work is not None
        wrong = [each.partition(":") for each in options.get("wrong", "").split(",") if each]
        return attested(
            work,
            self.bench.plan.grain,
            wrong={node: error or "wrong" for node, _, error in wrong},
            odd_samples=map(int, filter(None, options.get("odd_samples", "").split(","))),
        )

    def _mean_check(self, stream: int, options: Options) -> MeanCheck | None:
        """`odd=mean`: another mean than its own came; `odd=sums`: sums that nobody has sent.

        `heard=4`: what it heard of grain 4 is wrong.
        """
        work = self.bench.peers[stream].assignment
        assert work is not None
        heard = filter(None, options.get("heard", "").split(","))
        return mean_checked(work, wrong=dict.fromkeys(heard, "wrong"), odd=options.get("odd", ""))

    def _nodes_apart(self, stream: int, options: Options) -> tuple[NodeApart, ...]:
        work = self.bench.peers[stream].assignment
        assert work is not None
        given, check = self._attested(stream, options), self._mean_check(stream, options)
        written = bytes.fromhex(options.get("averages", ""))
        return nodes_apart(work, given, check, written)

    def _timings(self, samples: int, options: Options) -> on.StepTimings:
        """`speed` is in samples a second; the others are seconds."""
        computed = int(options.get("computed", str(samples)))
        busy_s = computed / float(options["speed"]) if "speed" in options else 0.0
        return on.StepTimings(
            busy_s=float(options.get("busy", str(busy_s))),
            wait_s=float(options.get("wait", "0")),
            computed=computed,
        )

    def paced(self, words: list[str], options: Options) -> list[do.Effect]:
        """This many steps; each worker has a speed (`w0=3`), shown is what the next ones take.

        Each takes `step` seconds. What is said of slow workers is shown too.
        """
        speeds = {name: options[name] for name in self.names if name in options}
        rest = {key: value for key, value in options.items() if key not in (*speeds, "step")}
        shown: list[do.Effect] = []
        said: list[do.Effect] = []
        for _ in range(int(words[0])):
            self.bench.now += float(options.get("step", "0"))
            for name in speeds:
                self.ready([name], {**rest, "speed": speeds[name]})
            said += [each for each in self.saved([], {}) if isinstance(each, do.NoteSlow)]
            shown = [effect for name in speeds for effect in self.ask([name], {})]
        return [*said, *shown]

    def steps(self, words: list[str], options: Options) -> list[do.Effect]:
        """This many steps of all workers without output, each with the same loss and norm.

        `w1_norm=3.0`: the own norm of one of them is another.
        """
        for _ in range(int(words[0])):
            for name in self.names:
                own = options.get(f"{name}_norm")
                self.ready([name], options if own is None else {**options, "own_norm": own})
            self.saved([], {})
            for name in self.names:
                self.ask([name], {})
        return []

    def fault(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        assignment = self.bench.peers[stream].assignment
        key = assignment.key if assignment is not None else None
        seen = on.Fault(
            kind=on.FaultKind[words[1]],
            key=_key(options["key"]) if "key" in options else key,
            rank=_number(options.get("rank", "")),
            block=_number(options.get("block", "")),
            element=int(options.get("element", "0")),
            value=options.get("value", ""),
            message=options.get("message", ""),
            error_type=options.get("error", ""),
            greatest=_key(options["greatest"]) if "greatest" in options else None,
        )
        return self.bench.send(on.FaultReported(stream, seen))

    def reducer_fault(self, words: list[str], options: Options) -> list[do.Effect]:
        """The service's own reducer stopped the round; `senders=0:1`: worker 1 sent as rank 0."""
        senders = [each.split(":") for each in options.get("senders", "").split(",") if each]
        seen = on.Fault(
            kind=on.FaultKind[words[0]],
            key=_key(options["key"]),
            rank=_number(options.get("rank", "")),
            block=_number(options.get("block", "")),
            element=int(options.get("element", "0")),
            value=options.get("value", ""),
            message=options.get("message", ""),
        )
        told = tuple((int(rank), int(worker)) for rank, worker in senders)
        return self.bench.send(on.RoundFaulted(seen, told))

    def beat(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        activity = on.Activity[options.get("activity", "COMPUTING")]
        detail = options.get("detail", "")
        logged = [each.split("=") for each in options.get("log", "").split(",") if each]
        scalars = tuple(
            Scalar(name.split("@")[0], int(name.split("@")[1]), float(value))
            for name, value in logged
        )
        sequence = int(options.get("sequence", "1"))
        return self.bench.send(on.HeartbeatArrived(stream, sequence, activity, detail, scalars))

    def scalars_saved(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        return self.bench.send(on.ScalarsSaved(stream, int(options.get("sequence", "1"))))

    def leave(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        head = self.bench.peers[stream].head
        digest = bytes.fromhex(options.get("digest", ""))
        step, _ = self.bench.where(head)
        reason = on.LeaveReason[words[1]]
        wrote = _number(options.get("wrote", ""))
        last = on.Checkpoint(wrote, f"/runs/step-{wrote}") if wrote is not None else None
        return self.bench.send(on.WorkerLeft(stream, reason, "", step, digest, head, last))

    def notice(self, words: list[str], options: Options) -> list[do.Effect]:
        """A worker's machine is about to go."""
        return self.bench.send(on.NoticeGiven(self._stream(words, options), "SIGTERM"))

    def report(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        transfer = self.bench.peers[stream].transfer
        assert transfer is not None
        failure = options.get("failure", "")
        head = None if failure else transfer.head
        if head is not None:
            self.bench.peers[stream].head = head
        return self.bench.send(on.StateReported(stream, transfer.transfer_id, head, failure))

    def listen(self, words: list[str], options: Options) -> list[do.Effect]:
        """A learner hears the averages of every round that opens from now on."""
        return self.bench.send(on.ListeningReported(self._stream(words, options)))

    def computed(self, words: list[str], options: Options) -> list[do.Effect]:
        """A worker has computed its share of the last round that it was assigned."""
        stream = self._stream(words, options)
        assignment = self.bench.peers[stream].assignment
        assert assignment is not None
        key = _key(options["key"]) if "key" in options else assignment.key
        assert key is not None
        return self.bench.send(on.WorkerComputed(stream, key))

    def scalar_all_reduce(self, words: list[str], options: Options) -> list[do.Effect]:
        stream = self._stream(words, options)
        head = self.bench.peers[stream].head
        number = int(options.get("number", "0"))
        value, weight = float(options["value"]), float(options["weight"])
        digest, prefixes = (bytes.fromhex(options.get(name, "")) for name in ("digest", "prefixes"))
        data = options.get("data", "").encode()
        given = value, weight, digest, head, prefixes, data
        return self.bench.send(on.ScalarAllReduceArrived(stream, head, number, *given))

    def end(self, words: list[str], options: Options) -> list[do.Effect]:
        return self.bench.send(on.WorkerStreamEnded(self._stream(words, options), "gone" in words))

    def stopped(self, words: list[str], options: Options) -> list[do.Effect]:
        """A worker's process has been stopped for some time."""
        return self.bench.send(on.WorkerStopped(self._stream(words, options), 0.2))

    def answer(self, words: list[str], options: Options) -> list[do.Effect]:
        """A worker is there; `number` is that of the probe."""
        number = int(options.get("number", "1"))
        return self.bench.send(on.ProbeAnswered(self._stream(words, options), number))

    def known(self, words: list[str], options: Options) -> list[do.Effect]:
        """So many heartbeats of each worker, a second apart, without output.

        Whoever is asked whether it is there answers after so long.
        """
        for _ in range(int(words[0])):
            self.bench.now += 1.0
            done = [effect for name in self.names for effect in self.beat([name], {})]
            self.bench.now += float(words[1])
            for effect in done:
                if isinstance(effect, do.SendProbe):
                    self.bench.send(on.ProbeAnswered(effect.stream, effect.number))
        return []

    def saved(self, words: list[str], options: Options) -> list[do.Effect]:
        return self.bench.send(on.RecordSaved(self.bench.journal.save_record()))

    def term_saved(self, words: list[str], options: Options) -> list[do.Effect]:
        return self.bench.send(on.TermSaved(self.bench.journal.save_term()))

    def found(self, words: list[str], options: Options) -> list[do.Effect]:
        """The journal answers which of the heads is in the history."""
        return self.bench.send(on.AncestorFound(*self.bench.journal.find_ancestor()))

    def folder(self, words: list[str], options: Options) -> list[do.Effect]:
        """The service looked for checkpoints in the run's folder."""
        found = _number(options.get("step", ""))
        damaged = tuple(each for each in options.get("damaged", "").split(";") if each)
        return self.bench.send(on.FolderSearched("runs/7f3a", found, damaged))

    def journal_failed(self, words: list[str], options: Options) -> list[do.Effect]:
        self.bench.journal.pending_records.clear()
        self.bench.journal.pending_searches.clear()
        return self.bench.send(on.JournalFailed("disk full"))

    def cord(self, words: list[str], options: Options) -> list[do.Effect]:
        return self.bench.send(on.CordPulled(options.get("reason", ""), "ada"))

    def clear(self, words: list[str], options: Options) -> list[do.Effect]:
        number = int(words[0])
        worker = _number(options.get("worker", ""))
        return self.bench.send(on.HaltCleared(number, HaltAnswer[words[1]], worker, "ada"))

    def drain(self, words: list[str], options: Options) -> list[do.Effect]:
        return self.bench.send(on.DrainRequested("ada"))

    def restart(self, words: list[str], options: Options) -> list[do.Effect]:
        peers = {name: self.bench.peers[stream] for name, stream in self.names.items()}
        back = _key(options["at"]) if "at" in options else None
        self.bench.restart(journal_kept="journal-lost" not in words, roll_back_to=back)
        for name, peer in peers.items():
            self.bench.peers[self.names[name]] = peer
        return []

    def _stream(self, words: list[str], options: Options) -> int:
        if "stream" not in options:
            return self.names[words[0]]
        label = f"{words[0]}#{options['stream']}".removesuffix("#1")
        return next(stream for stream, each in self.labels.items() if each == label)

    def _next_stream(self) -> int:
        return len(self.labels) + 1

    def _shown(self, effect: do.Effect) -> str:
        stream = getattr(effect, "stream", None)
        to = f" {self.labels[stream]}" if stream in self.labels else ""
        name = "".join(f"-{c.lower()}" if c.isupper() else c for c in type(effect).__name__)[1:]
        return f"{name}{to}: {_said(effect)}"


def _said(effect: do.Effect) -> str:  # noqa: C901 (one case an effect)
    match effect:
        case do.SaveEviction(incarnation, why, stand):
            return f"process {incarnation} {why or 'takes part again'}, {stand} stand"
        case do.SaveSpike(made):
            scale = f" by {made.scale:.3g}" if made.scale != 1 else ""
            return f"step {made.step} {made.action.value}{scale}: {made.what}"
        case do.SaveTerm(term):
            return f"{term >> 32}.{term % 2**32}"
        case do.SaveRun(plan, layout):
            size = f"{plan.dataset_size}"
            size += f" that are {plan.data_digest[:2]}" if plan.data_digest else ""
            return f"batch {plan.global_batch} of {size}, {layout.elements} elements"
        case do.SaveRecord(record, result, note, skipped, _):
            skip = ""
            if skipped is not None:
                ranges = (skipped.positions,) if skipped.ranges is None else skipped.ranges
                earlier = [f"{epoch}:{_range(part)}" for epoch, part in skipped.earlier]
                skip = f" skip {' '.join([*earlier, *map(_range, ranges)])}"
            return f"{_record(record)}{_result(result)}{skip}" + (f" ({note})" if note else "")
        case do.FindAncestor(heads):
            return " ".join(map(_shown_key, heads))
        case do.NoteWentBack():
            return effect.in_words
        case do.NoteSlow(worker):
            return f"worker {worker} {effect.in_words}"
        case do.NoteSlowness(slow) | do.SaveSlowness(slow):
            return slow.text
        case do.SendExplain(_, number):
            return f"{number}"
        case do.NoteCaughtUp(worker):
            return f"worker {worker} {effect.in_words}"
        case do.SaveHalt(evidence) | do.SendHalt(_, evidence):
            return _halt(evidence)
        case do.SaveAnswer(halt_id, answer, worker, operator):
            whom = f" {worker}" if worker is not None else ""
            return f"halt {halt_id} {answer.name}{whom} by {operator}"
        case do.SaveDeparture(worker, reason, message, step, digest, dropped):
            kind = "dropped" if dropped else f"lost, {message}"
            why = reason.name if reason is not None else kind
            return f"worker {worker} {why} at step {step} {digest.hex()}".rstrip()
        case do.AcceptJoin():
            stands = effect.join_status.name
            halt = f", {_halt(effect.halt)}" if effect.halt is not None else ""
            where = f"head {_shown_key(effect.head)} step {effect.step}"
            if effect.mistaken_s is not None:
                where += f" suspected wrongly, back after {effect.mistaken_s:.2f} s"
            return f"worker {effect.worker} {stands} {where}{halt}"
        case do.RefuseJoin(_, refusal):
            what = f"{refusal.component!r} {refusal.mine!r} {refusal.theirs!r}"
            return f"{refusal.reason.name} {what}: {refusal.message}"
        case do.Assign(_, each):
            positions = " ".join(map(_range, each.positions)) or "nothing"
            ahead = ""
            if each.ahead_batch is not None:
                shares = " ".join(map(_range, each.ahead)) or "nothing"
                ahead = f" ahead {shares} of {_range(each.ahead_batch)}"
                ahead += f" in {each.ahead_micro_batches}"
            if each.fragment is not None:
                ahead += f" fragment {each.fragment}"
            return (
                f"{_shown_key(each.key)} on {_shown_key(each.parent)} step {each.step} "
                f"attempt {each.attempt} rank {each.rank} of {list(each.roster)} "
                f"epoch {each.epoch} {positions} of {_range(each.batch)}{ahead}"
                f"{' attends' if each.attends else ' attended' if each.attended else ''}"
                f"{_map(each.reducers)}{_paced(each)}{_verified(each)}"
            )
        case do.SendCommitted(_, record, result, stop_reason):
            stop = f" stop {stop_reason!r}" if stop_reason else ""
            return f"{_record(record)}{_result(result)}{stop}"
        case do.SendLate(_, key):
            return _shown_key(key)
        case do.SendVoided(_, key, message):
            return f"{_shown_key(key)} {message}"
        case do.SendResume(_, halt_id, answer):
            return f"halt {halt_id} {answer.name}"
        case do.SendTransfer():
            head = f"{_shown_key(effect.head)} step {effect.step} cursor {_at(effect.cursor)}"
            number = effect.transfer_id % 2**31
            relay = f" through {effect.relay}" if effect.relay else ""
            beside = " beside training" if effect.beside_training else ""
            beside += " others wait" if effect.holds_up else ""
            beside += f" from {effect.checkpoint.folder}" if effect.checkpoint else ""
            return f"{number} {effect.role.name} {head} peer {effect.peer}{relay}{beside}"
        case do.EndSession(worker):
            return f"of worker {worker}"
        case do.SendProbe(_, number):
            return f"{number}"
        case do.NoteSuspected():
            return f"worker {effect.worker}"
        case do.SendLearn():
            return f"listen at {[share.address for share in effect.reducers]}"
        case do.SaveArithmetic(worker, _, items, step):
            shown = " ".join(f"{name}:{value}" for name, value in items) or "nothing"
            return f"worker {worker} states {shown} at step {step}"
        case do.NoteArithmetic():
            return f"worker {effect.worker}: {effect.in_words}"
        case do.NoteFewGrains(grains, workers):
            return f"{grains} grains for {workers} workers"
        case do.NoteDifference(step, node, workers):
            return f"step {step}: workers {list(workers)} differ in {node}"
        case do.NoteUnverified(workers):
            return f"workers {list(workers)}"
        case do.SaveVerdict():
            who = "nobody" if effect.worker is None else f"worker {effect.worker}"
            return f"step {effect.step} {_shown_key(effect.key)} {who}: {effect.text}"
        case do.NoteNotice(worker, why):
            return f"worker {worker}: {why}"
        case do.NoteSchedule(schedule, why):
            return f"{schedule.value}: {why}"
        case do.NoteWriter(worker, host, folder, elsewhere):
            where = " elsewhere" if elsewhere else ""
            return (
                f"worker {worker} on {host}{where} in {folder}" if worker is not None else "nobody"
            )
        case do.NoteCheckpoint(worker, step, folder):
            return f"worker {worker} wrote step {step} to {folder}"
        case do.NoteOverdue(step, writer, last):
            return f"step {step} of worker {writer}, the last is {last}"
        case do.NoteSetback(worker, _, failures, pause_s, why):
            return f"worker {worker}, failure {failures}, next try in {pause_s:g} s: {why}"
        case do.SendScalarAllReduceResult(_, head, sequence, value, weight, contributors, data):
            mean = f"{value!r} weight {weight!r} of {contributors}"
            mean += "".join(f" {each.decode()!r}" for each in data)
            return f"{sequence} at {_shown_key(head)}: {mean}"
        case do.SendHeartbeatAnswer(_, sequence):
            return str(sequence)
        case do.SaveSteered(step, answer, left_out):
            given = "left out" if left_out else f"{answer.value!r} {len(answer.data)} parts"
            return f"{answer.sequence} at step {step}: {given}"
        case do.SaveScalars(worker, scalars):
            logged = ", ".join(f"{each.name}@{each.step}={each.value!r}" for each in scalars)
            return f"worker {worker}: {logged}"
        case do.NoteStopRefused(worker, why):
            return f"worker {worker}: {why}"
        case do.NoteScalarsRefused(worker, name):
            return f"worker {worker}: {name}"
        case do.SaveRunEvent(event):
            return f"{event.kind.value}: {event.text}"
        case do.SendShutdown(message=message, keep_state=True):
            return f"{message}, keep state"
        case (
            do.CloseStream(message=message)
            | do.CloseReducer(message=message)
            | do.SendShutdown(message=message)
        ):
            return message
        case do.RefuseOperator(message):
            return message


def _paced(each: do.Assignment) -> str:
    """How an assignment differs from equal shares of the global batch, and what goes with it."""
    parts = {
        "targets": list(each.split.targets),
        "interleaved": each.split.interleaved,
        "window": each.window,
        "micro-batches": each.micro_batches,
        "rate": each.learning_rate_scale if each.learning_rate_scale != 1.0 else 0,
        "scale": each.change_scale if each.change_scale != 1.0 else 0,
    }
    shown = "".join(f" {name} {value}" for name, value in parts.items() if value)
    shown += f" ring {' '.join(each.ring_addresses)}" if each.ring_addresses else ""
    return shown + (" copies buffers" if each.copies_buffers else "")


def _verified(each: do.Assignment) -> str:
    """What is computed again, and attested."""
    verifies = f" verifies {' '.join(map(str, each.verifies))}" if each.verifies else ""
    inquest = f"{' anew' if each.anew else ''}{' itemised' if each.itemised else ''}"
    return f"{' attests' if each.attests else ''}{verifies}{inquest}"


def _pacing(options: Options) -> PacingSettings:
    schedule = options.get("schedule", "every-step")
    shares = options.get("shares", "equal")
    return PacingSettings(
        schedule=None if schedule == "auto" else Schedule(schedule),
        balanced=shares.startswith("balanced"),
        interleaved=shares.endswith("interleaved"),
        cadence=CadenceRules(max_anchor=int(options.get("max_anchor", "16"))),
        learning_rate_scaling=LearningRateScaling(options.get("lr_scaling", "none")),
        growth_cost=float(options.get("growth_cost", "0.05")),
        eviction=EvictionRules(
            slower_than=float(options["evict"]),
            ease_s=2.0,
            ease_steps=4,
            follow_s=2.0,
            follow_steps=4,
        )
        if "evict" in options
        else None,
    )


def _record(record: Record) -> str:
    roster = f" by {list(record.roster)}" if record.roster else ""
    return (
        f"{record.kind.name} {_shown_key(record.key)} on {_shown_key(record.parent)} "
        f"step {record.step} cursor {_at(record.cursor)}{roster}"
    )


def _result(result: StepResult | None) -> str:
    if result is None:
        return ""
    overflow = " overflow" if result.overflow else ""
    overflow += f" scaled by {result.gradient_scale:.3g}" if result.gradient_scale != 1 else ""
    late = "".join(
        f" worker {each.worker} late by {each.late}" for each in result.contributions if each.late
    )
    what = f"samples {result.samples} from {result.contributors}{overflow}{late}"
    return f" loss {result.loss!r} {what}"


def _halt(evidence: HaltEvidence) -> str:
    key = _shown_key(evidence.key)
    worker = "" if evidence.worker is None else f" worker {evidence.worker}"
    claimed = f" claimed by {evidence.reported_by}" if evidence.claimed else ""
    what = f"{evidence.reason.name} step {evidence.step} voids {key}{worker}{claimed}"
    return f"halt {evidence.id} {what}: {evidence.message}"


def _map(shares: tuple[ReducerShare, ...]) -> str:
    """Who averages what, if not the coordinator alone."""
    if not any(share.address for share in shares):
        return ""
    parts = [f"{share.address or 'own'} [{share.start},{share.stop})" for share in shares]
    return f" at {' '.join(parts)}"


def _shown_key(key: Key | None) -> str:
    if key is None:
        return "none"
    counter, bits = divmod(key.term, 2**32)
    return f"{counter}{'' if bits == counter else f'.{bits}'}/{key.round}"


def _capabilities(options: Options) -> frozenset[str]:
    """What a worker can do: `older` is one of a version that lacks what all have since."""
    older = "older" in options
    can = options.get("can", "").split(",")
    return frozenset(filter(None, (*can, "" if older else OVERFLOW)))


def _arithmetic(text: str) -> Arithmetic:
    """As in `threads:1,torch:2.0`; `none` states nothing."""
    return () if text == "none" else in_order(dict(each.split(":") for each in text.split(",")))


def _key(text: str) -> Key | None:
    if text == "none":
        return None
    term, _, number = text.partition("/")
    high, _, low = term.partition(".")
    return Key((int(high) << 32) + int(low or high), int(number))


def _cursor(text: str) -> Cursor:
    epoch, _, position = text.partition(":")
    return Cursor(int(epoch), int(position))


def _at(cursor: Cursor) -> str:
    owed = f" owed {' '.join(map(_range, cursor.owed))}" if cursor.owed else ""
    return f"{cursor.epoch}:{cursor.position}{owed}"


def _range(positions: PositionRange) -> str:
    return f"[{positions.start},{positions.stop})"


def _real(text: str) -> float | None:
    return float(text) if text else None


def _node_losses(text: str) -> tuple[NodeLoss, ...]:
    """As in `0+2:8:4.5`: two grains from grain 0 on, with weight and sum of losses."""
    losses = []
    for each in text.split(","):
        node, weight, loss_sum = each.split(":")
        first, _, grains = node.partition("+")
        at = Node(int(first), int(first) + int(grains))
        losses.append(NodeLoss(at, float(weight), float(loss_sum)))
    return tuple(losses)


def _number(text: str) -> int | None:
    return int(text) if text else None
