"""Reducing: two reducers share the model, then an invalid map."""

from __future__ import annotations

from andon.protocol.layout import Chunk
from andon.protocol.reducers import ReducerShare, chunks_by_address
from andon_conformance.judge.bench import Bench, Scenario
from andon_conformance.judge.checks import Check, Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import steady
from andon_conformance.judge.transcript import ENDED, EXITED, Event

__all__ = ["REDUCING"]

_CHECKS = (
    Check("reducers.streams", "opens a stream to each reducer of the partition", "section 4"),
    Check("reducers.chunks", "sends each chunk to its own reducer, and to no other",
          "section 4"),
    Check("reducers.patience", "is not ready before it has the averages of all reducers",
          "section 4"),
    Check("reducers.abstain", "abstains at each reducer", "section 4"),
    Check("reducers.map", "contributes nothing if the partition leaves out a part of the model",
          "section 3"),
)  # fmt: skip


async def _play(bench: Bench) -> None:
    verdicts = bench.verdicts
    line = await bench.start(LineSetting(reducers=2))
    await line.bootstrap()
    await line.asks()
    if len(line.chunks()) < line.setting.reducers:
        for check in _CHECKS:
            verdicts.skip(check.name, "the client's model is a single chunk")
        return
    lanes = _lanes(line)
    current = line.assign()
    with verdicts.deciding("reducers.chunks"):
        await line.gives(current)
    opened = {stream.address for stream in line.reduce_streams()}
    evidence = f"streams to {len(opened)} of {len(lanes)} reducers"
    verdicts.judge("reducers.streams", opened == set(lanes), evidence)
    sent = {
        Chunk(each.message.block, each.message.offset, each.message.count): each.stream.address
        for each in current.given
    }
    wrong = [
        chunk for address, lane in lanes.items() for chunk in lane if sent.get(chunk) != address
    ]
    evidence = f"{len(wrong)} of {len(sent)} chunks went elsewhere"
    if not verdicts.judge("reducers.chunks", not wrong, evidence):
        raise Stopped("the client knows no other reducers")

    answers = line.answers(current)
    for stream, answer in answers:
        if not stream.address:
            stream.send(answer)
    early = await line.transcript.pause()
    ready = [event for event in early if event.kind == "step_ready"]
    evidence = f"{len(ready)} StepReady came with one reducer's averages held back"
    verdicts.judge("reducers.patience", not ready, evidence)
    for stream, answer in answers:
        if stream.address:
            stream.send(answer)
    with verdicts.deciding("reducers.patience"):
        await line.ready(current)
    line.commit(current)

    await _abstain(bench, line, lanes)
    await _refuse(bench, line)


def _lanes(line: ScriptedLine) -> dict[str, list[Chunk]]:
    """The chunks of each reducer."""
    chunks = chunks_by_address(line.layout, line.setting.policy.chunk_elements, line.shares)
    return {address: [each for block in lane for each in block] for address, lane in chunks.items()}


async def _abstain(bench: Bench, line: ScriptedLine, lanes: dict[str, list[Chunk]]) -> None:
    verdicts, name = bench.verdicts, "reducers.abstain"
    await line.asks()
    current = line.assign(empty=True)
    averages = line.averages(current)
    for address, lane in lanes.items():

        def is_there(event: Event, address: str = address) -> bool:
            return event.kind == "abstain" and event.stream.address == address

        with verdicts.deciding(name):
            place = address or "the coordinator's own reducer"
            event = await line.transcript.wait(f"Abstain at {place}", is_there, current.began)
        current.abstained.append((event.stream, event.message))
        event.stream.send_all([averages.message(chunk, steady(chunk)) for chunk in lane])
    with verdicts.deciding(name):
        ready = await line.ready(current)
    evidence = f"it abstained at {len(current.abstained)} reducers, with weight {ready.weight:g}"
    verdicts.judge(name, ready.weight == 0, evidence)
    line.commit(current)


async def _refuse(bench: Bench, line: ScriptedLine) -> None:
    """The next round's partition ends one element too early."""
    verdicts, name = bench.verdicts, "reducers.map"
    *most, last = line.shares
    short = [*most, ReducerShare(last.address, last.start, last.stop - 1)]
    await line.asks()
    current = line.assign(reducers=short)
    with verdicts.deciding(name):
        event = await line.transcript.wait(
            "Fault, or the end of the stream",
            lambda event: (
                event.kind in (EXITED, "block_gradient")
                or line.of_round("fault", current)(event)
                or (event.kind == ENDED and event.stream is line.train)
            ),
            current.began,
        )
    verdicts.judge(name, event.kind != "block_gradient", f"{event.kind} came")


REDUCING = Scenario(
    name="reducers",
    summary="two reducers share the model, then an invalid map",
    checks=_CHECKS,
    play=_play,
)
