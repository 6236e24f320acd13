"""Transcripts of the reducer: what happened, then every effect.

A transcript is a text file. Lines that begin with `#` are prose. The first line is `settings
window=N`: the window holds N messages of four numbers. `chunk=N` there sets where blocks are cut,
and `listener=N` how many such averages may be on their way to one listener.

Every other command begins with `> `. All its effects follow, one in each line, and are compared
exactly. A line with `=` gives the bytes that are held now, if they changed.
`ANDON_REWRITE_TRANSCRIPTS=1 pytest ...` writes the effects anew: read the diff.

`open NAME worker=N` opens a stream, with `listens=yes` one that only listens, and `map NAME` lets
its worker share memory. `chunk NAME rank=0/2 at=BLOCK:OFFSET of=NUMBERS` is a contribution; with
`slice=yes` its numbers lie in shared memory, with `crc32c=right` or `wrong` it has a checksum, and
with `node=FIRST+GRAINS/BATCH` it is the sum of a node, with grains of two positions. Keys are
written term/round. `reduce` does the arithmetic of a job, and `sent` means that a stream took its
average. Each command happens one second after the one before.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    Operation,
    RoundAborted,
    Slice,
    StaleRound,
    TreeNode,
)
from andon.protocol.records import Key
from andon.wire.checksums import crc32c_of
from andon_reducer.core import effects as do
from andon_reducer.core import events as on
from andon_reducer.core.exchange import OVERHEAD_BYTES
from andon_reducer.core.jobs import Job, reduce_chunk
from andon_reducer.core.rounds import Rounds
from scenarios import transcript
from scenarios.transcript import Options, options_of

__all__ = ["play"]

MESSAGE_BYTES = 4 * 4 + OVERHEAD_BYTES
"""What one message of four numbers takes of the window."""


def play(text: str) -> str:
    """The transcript with its effects as they are now."""
    return transcript.play(text, _Commands)


class _Commands:
    def __init__(self, options: Options) -> None:
        window_bytes = int(options.get("window", "8")) * MESSAGE_BYTES
        chunk = int(options["chunk"]) if "chunk" in options else None
        self.rounds = Rounds(
            window_bytes=window_bytes,
            max_payload_bytes=64,
            chunk_elements=chunk,
            listener_bytes=int(options.get("listener", "64")) * MESSAGE_BYTES,
        )
        self.streams: dict[str, int] = {}
        self.jobs: dict[int, Job] = {}
        self.answers: dict[int, AveragedBlock | BlockFault | RoundAborted] = {}
        self.now = 0.0
        self.held = 0

    def run(self, command: str) -> Iterator[str]:
        name, *words = shlex.split(command)
        makers: dict[str, Callable[[list[str]], on.Event]] = {
            "open": self.open,
            "map": self.map,
            "chunk": self.chunk,
            "abstain": self.abstain,
            "reduce": self.reduce,
            "sent": self.sent,
            "end": self.end,
        }
        event = makers[name](words)
        self.now += 1
        for effect in self.rounds.receive(event, self.now):
            if isinstance(effect, do.Reduce):
                self.jobs[effect.job.id] = effect.job
            yield self.shown(effect)
        if self.rounds.inflight_bytes != self.held:
            self.held = self.rounds.inflight_bytes
            yield f"= {self.held} bytes held"

    def open(self, words: list[str]) -> on.Event:
        options = options_of(words[1:])
        number = self.streams[words[0]] = len(self.streams) + 1
        run, worker = options.get("run", "7f3a"), int(options["worker"])
        return on.ReduceStreamOpened(number, run, worker, listens="listens" in options)

    def map(self, words: list[str]) -> on.Event:
        return on.MemoryMapped(self.streams[words[0]])

    def chunk(self, words: list[str]) -> on.Event:
        options = options_of(words[1:])
        rank, world_size = map(int, options["rank"].split("/"))
        block, offset = map(int, options["at"].split(":"))
        encoding = Encoding.of(options.get("as", "float32"))
        numbers = np.array([float(n) for n in options.get("of", "1,2,3,4").split(",")], np.float32)
        answer = options.get("answer")
        gradient = BlockGradient(
            key=_key(options),
            group=int(options.get("group", "0")),
            sequence=int(options.get("sequence", "0")),
            operation=Operation[options.get("operation", "weighted_mean").upper()],
            rank=rank,
            world_size=world_size,
            block=block,
            offset=offset,
            count=numbers.size,
            weight=float(options.get("weight", "1")),
            encoding=encoding,
            answer_encoding=Encoding.of(answer) if answer else None,
            payload=encode(numbers, encoding),
            # Where it lies matters to the adapter only. The core must know that it is a slice.
            slice=Slice(0, 4 * numbers.size, 1) if "slice" in options else None,
            node=_node(options["node"]) if "node" in options else None,
        )
        if "crc32c" in options:
            flipped = 1 if options["crc32c"] == "wrong" else 0
            gradient = replace(gradient, crc32c=crc32c_of(gradient) ^ flipped)
        return on.GradientArrived(self.streams[words[0]], gradient)

    def abstain(self, words: list[str]) -> on.Event:
        options = options_of(words[1:])
        rank, world_size = map(int, options["rank"].split("/"))
        abstain = Abstain(
            key=_key(options),
            group=int(options.get("group", "0")),
            sequence=int(options.get("sequence", "0")),
            rank=rank,
            world_size=world_size,
        )
        return on.Abstained(self.streams[words[0]], abstain)

    def reduce(self, words: list[str]) -> on.Event:
        job = self.jobs.pop(int(words[0]))
        answer = self.answers[job.id] = reduce_chunk(job)
        return on.ChunkReduced(job.id, None if isinstance(answer, AveragedBlock) else answer)

    def sent(self, words: list[str]) -> on.Event:
        return on.AverageSent(self.streams[words[0]], int(words[1]))

    def end(self, words: list[str]) -> on.Event:
        return on.ReduceStreamEnded(self.streams[words[0]])

    def shown(self, effect: do.Effect) -> str:
        match effect:
            case do.Reduce(job):
                ranks = [part.rank for part in job.contributions]
                at = f"{job.block}:{job.offset}+{job.count}"
                where = " in place" if job.in_place else " and to memory" if job.to_memory else ""
                what = f"{_shown(job.key)} {job.sequence}/{at}"
                return f"reduce {job.id}: {what} of {ranks}{where}"
            case do.SendAverage(job_id, streams):
                answer = self.answers[job_id]
                assert isinstance(answer, AveragedBlock), "a fault is not sent as an average"
                return f"send-average {self.names(streams)}: job {job_id} {_average(answer)}"
            case do.SendNotice(streams, notice, job_id):
                reported = "" if job_id is None else f", reported as {job_id}"
                return f"{_notice(notice, self.names(streams))}{reported}"
            case do.RefuseStream(number, refusal):
                return f"refuse {self.names([number])}: {refusal.reason.name} ({refusal.message})"
            case do.PauseStream(number):
                return f"pause {self.names([number])}"
            case do.ResumeStream(number):
                return f"resume {self.names([number])}"
            case do.FreeRound(_, key, outcome, seconds, _, senders):
                took = "".join(f", an exchange took {each:g} s" for each in seconds)
                sent = "".join(f", rank {rank} from worker {worker}" for rank, worker in senders)
                return f"free-round {_shown(key)}: {outcome.value}{took}{sent}"

    def names(self, numbers: list[int] | tuple[int, ...]) -> str:
        by_number = {number: name for name, number in self.streams.items()}
        return " ".join(by_number[number] for number in numbers)


def _node(text: str) -> TreeNode:
    own, _, batch = text.partition("/")
    first, _, grains = own.partition("+")
    return TreeNode(int(first), int(grains), int(batch), 2)


def _average(answer: AveragedBlock) -> str:
    numbers = ",".join(
        f"{number:g}" for number in decode(answer.payload, answer.encoding, answer.count)
    )
    what = f"{answer.encoding.label} {numbers}" if answer.count else "nothing"
    parts = f"{answer.contributors}/{answer.world_size} ranks, weight {answer.total_weight:g}"
    return f"{what} from {parts}"


def _notice(notice: do.Notice, streams: str) -> str:
    match notice:
        case AveragedBlock():
            return f"send-empty-average {streams}: {_average(notice)}"
        case BlockFault():
            where = f"block {notice.block} element {notice.element}"
            what = f"{notice.kind.name} rank {notice.rank} {where} value {notice.value}"
            return f"send-fault {streams}: {_shown(notice.key)} {what} ({notice.message})"
        case StaleRound():
            return f"send-stale {streams}: {_shown(notice.key)}, greatest {_shown(notice.greatest)}"
        case RoundAborted():
            return f"send-aborted {streams}: {_shown(notice.key)} ({notice.message})"


def _key(options: Options) -> Key:
    term, round_ = options.get("key", "1/1").split("/")
    return Key(int(term), int(round_))


def _shown(key: Key) -> str:
    return f"{key.term}/{key.round}"
