"""Transcripts of sessions: what happened, then every effect.

A transcript is a text file. Lines that begin with `#` are prose. The first line is `settings`, with
`lease=SECONDS`, `term=N` or `formed=N` where the defaults will not do. Every other command begins
with `> `, and all its effects follow, one in each line.

Streams have names: `attend A rank=0/2` opens stream A. By default each process has an incarnation
of its own; `as=NAME` is that of another stream's. `report A`, `fault A rank_left culprit=1` and
`leave A done` come with the key of A's session unless `key=` says another one; `end A` ends the
stream. `saved` means that the journal has what it was last given, `not-saved` that it can't. `cord`
is `andon halt`, `going` the end of the service, and `wait 0.5` lets time pass.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport, SessionEnd, SessionOver
from andon_coordinator.core import session_events as on
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.effects import RefuseOperator, SaveHalt, SaveScalars
from andon_coordinator.core.events import (
    CordPulled,
    SessionNotSaved,
    SessionSaved,
    TimePassed,
)
from andon_coordinator.core.sessions import SessionsCore
from scenarios import transcript
from scenarios.transcript import Options, options_of

__all__ = ["play"]

_NODES = ("alpha", "beta", "gamma", "delta")


def play(text: str) -> str:
    """The transcript with its effects as they are now."""
    return transcript.play(text, _Commands)


class _Commands:
    def __init__(self, options: Options) -> None:
        self.core = SessionsCore(
            keys=Keys(int(options.get("term", "5")), lambda: 7),
            lease_s=float(options.get("lease", "3")),
            formed=int(options.get("formed", "0")),
        )
        self.streams: dict[str, int] = {}
        self.keys: dict[str, Key] = {}
        self.incarnations: dict[str, int] = {}
        self.saving: Key | None = None
        self.now = 0.0

    def run(self, line: str) -> Iterator[str]:
        name, *words = shlex.split(line)
        for effect in self.core.receive(self.event(name, words), self.now, wall=1e9):
            if isinstance(effect, on.SaveSession):
                self.saving = effect.key
            if isinstance(effect, on.SendFormed):
                self.keys[self.name(effect.stream)] = effect.key
            yield self.shown(effect)

    def event(self, name: str, words: list[str]) -> on.SessionEvent:
        match name:
            case "attend":
                return self.attend(words[0], options_of(words[1:]))
            case "report":
                return self.report(words[0], options_of(words[1:]))
            case "fault":
                return self.fault(words[0], words[1], options_of(words[2:]))
            case "leave":
                options = options_of(words[1:])
                return on.RankLeft(
                    self.streams[words[0]], self.key(words[0], options), "done" in options
                )
            case "end":
                return on.RankStreamEnded(self.streams[words[0]])
            case "saved":
                assert self.saving is not None
                return SessionSaved(self.saving)
            case "not-saved":
                assert self.saving is not None
                return SessionNotSaved(self.saving, "the disk is full")
            case "cord":
                return CordPulled(" ".join(words), "kim")
            case "going":
                return on.ServiceLeaving()
        assert name == "wait", name
        self.now += float(words[0])
        return TimePassed()

    def attend(self, name: str, options: Options) -> on.SessionEvent:
        rank, size = map(int, options["rank"].split("/"))
        self.streams[name] = number = len(self.streams) + 1
        same = options.get("as")
        self.incarnations[name] = self.incarnations[same] if same else 100 + number
        request = on.AttendRequest(
            rank=rank,
            world_size=size,
            incarnation=self.incarnations[name],
            node_id=options.get("on", _NODES[rank % 4]),
            protocol_version=int(options.get("version", "1")),
            capabilities=frozenset(filter(None, options.get("can", "").split(","))),
            greatest_term=int(options.get("term", "0")),
        )
        return on.RankAttended(number, request, "trains" in options)

    def report(self, name: str, options: Options) -> on.SessionEvent:
        number = int(options.get("number", "1"))
        report = RankReport(
            steps=int(options.get("steps", "0")),
            pending=_pending(options["in"]) if "in" in options else None,
            numbers=(("loss", 1, float(options["loss"])),) if "loss" in options else (),
        )
        return on.RankReported(self.streams[name], self.key(name, options), number, report)

    def fault(self, name: str, end: str, options: Options) -> on.SessionEvent:
        fault = RankFault(
            end=SessionEnd[end.upper()],
            culprit=int(options["culprit"]) if "culprit" in options else None,
            message=options.get("said", ""),
            call=_pending(options["in"]) if "in" in options else None,
            parameter=options.get("parameter", ""),
            element=(3, 1) if "parameter" in options else (),
            value=options.get("value", ""),
        )
        return on.RankFaulted(self.streams[name], self.key(name, options), fault)

    def key(self, name: str, options: Options) -> Key | None:
        if "key" in options:
            return Key(*map(int, options["key"].split("/"))) if options["key"] else None
        return self.keys.get(name)

    def name(self, stream: int) -> str:
        return next(name for name, number in self.streams.items() if number == stream)

    def shown(self, effect: on.SessionEffect) -> str:
        match effect:
            case on.RefuseAttendance(stream, refusal):
                return f"refuse {self.name(stream)}: {refusal.reason} ({refusal.message})"
            case on.CloseAttendance(stream, reason, message):
                why = f": {reason} ({message})" if reason else ""
                return f"close {self.name(stream)}{why}"
            case on.SendFormed():
                can = (
                    f", all can {', '.join(sorted(effect.capabilities))}"
                    if effect.capabilities
                    else ""
                )
                who = f"{self.name(effect.stream)}: {_shown(effect.key)}, rank {effect.rank}"
                return f"formed {who} of {len(effect.roster)}, lease {effect.lease_s:g} s{can}"
            case on.SendReportAnswer(stream, number):
                return f"answer {self.name(stream)}: {number}"
            case on.SendOver(stream, over):
                return f"over {self.name(stream)}: {_over(over)}"
            case _:
                return _saved(effect)


def _saved(effect: on.SessionEffect) -> str:
    match effect:
        case on.SaveSession(key, roster):
            return f"save {_shown(key)}: {len(roster)} ranks"
        case on.SaveSessionEnd(key, over):
            return f"save-end {_shown(key)}: {'in order' if over is None else over.end.name}"
        case SaveHalt(evidence):
            where = f" worker {evidence.worker}" if evidence.worker is not None else ""
            place = f" {evidence.place}" if evidence.place else ""
            what = f"{evidence.reason.name}{where}{place} at step {evidence.step}"
            return f"save-halt {evidence.id}: {what}"
        case SaveScalars(worker, scalars):
            numbers = ", ".join(f"{each.name}={each.value:g}" for each in scalars)
            return f"save-numbers of rank {worker}: {numbers}"
        case RefuseOperator(message):
            return f"refuse-operator: {message}"
    raise AssertionError(f"no words for {effect}")


def _pending(text: str) -> PendingCall:
    """`7:KIND:COUNT` is the seventh call of the default group."""
    sequence, kind, count = text.split(":")
    made = CallKind[kind.upper()]
    call = Call(
        kind=made, dtype="float32", count=int(count), reduction="sum" if made.reduces else ""
    )
    return PendingCall(group_name="default", group=1, sequence=int(sequence), call=call, open_s=1.0)


def _over(over: SessionOver) -> str:
    culprit = "nobody" if over.culprit is None else f"rank {over.culprit}"
    by = f", reported by {over.reported_by}" if over.reported_by is not None else ""
    return f"{over.end.name} {culprit}{by} ({over.message})"


def _shown(key: Key) -> str:
    return f"{key.term}/{key.round}"
