"""Graining: grains, the nodes of their tree, and sums along it that outlive void attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

import numpy as np

from andon.protocol.capabilities import SAME_BITS
from andon.protocol.encoding import decode
from andon.protocol.grains import TREE_VERSION, Grains, Node, cover, fold
from andon.protocol.layout import Chunk
from andon.protocol.messages import BlockGradient, Operation
from andon.protocol.records import PositionRange
from andon.protocol.shards import next_batch
from andon.protocol.sums import sum_in_order
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.control import LineSetting
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientChunk, ClientRound, Floats, steady
from andon_conformance.judge.transcript import Event

__all__ = ["IN_GRAINS", "graining", "grains_of", "nodes_came"]

IN_GRAINS = LineSetting(slot=1, workers=3, same_bits=True)
"""A line of three whose client is asked for grains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """What the client sent of one node, and what it reported of it."""

    vector: Floats
    weight: float
    loss_sum: float = 0.0


@dataclass(kw_only=True)
class _Attempt:
    """One attempt at a step, whose share is some of a batch's grains."""

    current: ClientRound
    grains: Grains
    nodes: tuple[Node, ...]
    """Those that the client must contribute."""
    sums: dict[Node, _Sum] = field(default_factory=dict)
    """What it contributed."""


@scenario(
    "grains",
    """
    grains.plan     section 31  offers `same-bits.v1`, and its plan names the tree 1
    grains.opening  section 33  names `same-bits.v1` when it opens a Reduce stream
    grains.nodes    section 33  contributes the maximal nodes of its grains, and nothing else
    grains.order    section 33  sends all nodes of a chunk in rising order, before the next chunk
    grains.weight   section 33  sends a node with one weight, as float32 for the weighted mean
    grains.losses   section 34  reports weight and loss of each node in rising order, added along
                                the tree
    grains.tree     section 32  adds up gradients and weights along the tree, bit for bit
    grains.kept     section 31  has the same sums in an attempt after one that became void
    grains.abstain  section 33  abstains from a share without grains
    grains.part     section 31  refuses a part of a grain with Fault PROTOCOL
    grains.reducer  section 33  sends no node to a reducer that lacks `same-bits.v1`
    """,
)
async def graining(bench: Bench) -> None:
    """Five attempts at a step in grains, a part of a grain, and a reducer without the tree."""
    line = await bench.started(IN_GRAINS)
    if not line.plan.grain:
        bench.verdicts.skip_undecided("its plan has no grain")
        return
    _judge_plan(line)
    # Single grains first, whose sums and losses are then known. A worker can keep nothing of one
    # half for the other.
    leaves: dict[Node, _Sum] = {}
    for begin in (0, 1):
        every_other = [PositionRange(each, each + 1) for each in range(begin, _count(line), 2)]
        if every_other:
            attempt = await _averaged(line, every_other)
            leaves |= attempt.sums
            line.void(attempt.current)
    await _judge_sums(bench, line, leaves)
    await _abstain(line)
    await _part(bench, line)
    # Of whoever does not name the capability, no reducer says that it has it.
    if bench.verdicts.holds("grains.opening"):
        await _unable(bench)


def _judge_plan(line: ScriptedLine) -> None:
    capable, tree = SAME_BITS in line.join.capabilities, line.join.plan.tree
    evidence = f"tree {tree}, {'with' if capable else 'without'} {SAME_BITS}"
    line.judge("grains.plan", capable and tree == TREE_VERSION, evidence)


async def _judge_sums(bench: Bench, line: ScriptedLine, leaves: Mapping[Node, _Sum]) -> None:
    """Two more attempts at the step, of which the second is committed."""
    count = _count(line)
    if count > 1:
        # Without grain 1 no earlier attempt's grains are all there: everything is computed anew.
        without = [PositionRange(0, 1), *([PositionRange(2, count)] if count > 2 else [])]
        attempt = await _gives(line, without)
        _judge_tree(line, "grains.tree", attempt, leaves)
        line.void(attempt.current)
    else:
        for name in ("grains.tree", "grains.kept"):
            bench.verdicts.skip(name, "its batch is a single grain")
    attempt = await _averaged(line, [PositionRange(0, count)])
    # A client that adds otherwise than the tree shows nothing of what it kept.
    if bench.verdicts.holds("grains.tree"):
        _judge_tree(line, "grains.kept", attempt, leaves)
    for node, found in attempt.sums.items():
        loss = fold({leaf: each.loss_sum for leaf, each in leaves.items()}, node, add)
        evidence = f"{node} has the loss {found.loss_sum!r}, and its grains have {loss!r}"
        line.judge("grains.losses", found.loss_sum == loss, evidence)
    line.commit(attempt.current)


def _judge_tree(
    line: ScriptedLine, name: str, attempt: _Attempt, leaves: Mapping[Node, _Sum]
) -> None:
    """Compares the sums of an attempt with those of its grains."""
    for node, found in attempt.sums.items():
        mine = {leaf: each for leaf, each in leaves.items() if node.first <= leaf.first < node.stop}
        vector = fold({leaf: each.vector for leaf, each in mine.items()}, node, np.add)
        weight = fold({leaf: each.weight for leaf, each in mine.items()}, node, add)
        other = np.flatnonzero(vector.view(np.uint32) != found.vector.view(np.uint32))
        evidence = f"{node}: {len(other)} of {len(vector)} elements have other bits than their "
        evidence += f"grains give, weight {found.weight!r} and {weight!r}"
        line.judge(name, not len(other) and found.weight == weight, evidence)


# ---------------------------------------------------------------------- one attempt


def _count(line: ScriptedLine) -> int:
    return grains_of(line).count


def grains_of(line: ScriptedLine) -> Grains:
    """The grains of the next batch."""
    plan = line.plan
    return Grains(next_batch(line.cursor, plan.global_batch, plan.epoch_size), plan.grain)


async def _gives(line: ScriptedLine, owned: Iterable[PositionRange]) -> _Attempt:
    """Assigns grains, and judges how the client contributes their nodes."""
    await line.asks()
    grains = grains_of(line)
    owned = list(owned)
    current = line.assign(positions=grains.ranges(owned))
    attempt = _Attempt(current=current, grains=grains, nodes=cover(owned, grains.count))
    await line.must("grains.nodes", nodes_came(line, current, len(attempt.nodes)))
    _judge_nodes(line, attempt)
    return attempt


async def nodes_came(line: ScriptedLine, current: ClientRound, count: int) -> None:
    """Waits until a round has all chunks of so many contributions, whatever their nodes are."""
    wanted = len(line.chunks()) * count
    places: set[tuple[object, ...]] = set()

    def complete(event: Event) -> bool:
        if event.kind == "block_gradient" and event.message.key == current.key:
            message: BlockGradient = event.message
            current.given.append(ClientChunk(event.stream, message))
            places.add((message.block, message.offset, message.node))
        return len(places) >= wanted

    what = f"{count} nodes of {len(line.chunks())} chunks"
    await line.transcript.wait(what, complete, current.began)


def _judge_nodes(line: ScriptedLine, attempt: _Attempt) -> None:
    messages = [given.message for given in attempt.current.given]
    tree = attempt.grains.count, attempt.grains.micro_batch
    nodes = [each.node for each in messages]
    found = {each.node for each in nodes if each is not None and each.tree == tree}
    evidence = f"{_named(found)} came, and its grains have {_named(attempt.nodes)}"
    right = None not in nodes and found == set(attempt.nodes)
    if not line.judge("grains.nodes", right, evidence):
        raise Stopped("the client's contributions are not the nodes of its grains")
    places = [(each.block, each.offset, each.node and each.node.first) for each in messages]
    evidence = f"{len(places)} contributions in the order {places[:4]}"
    line.judge("grains.order", places == sorted(places), evidence)
    for node in attempt.nodes:
        mine = [each for each in messages if each.node is not None and each.node.node == node]
        _judge_one(line, attempt, node, mine)
    openings = line.transcript.find(lambda event: event.kind == "open_round")
    able = [SAME_BITS in event.message.capabilities for event in openings]
    evidence = f"{sum(able)} of {len(able)} OpenRound name it"
    line.judge("grains.opening", all(able), evidence)


def _judge_one(
    line: ScriptedLine, attempt: _Attempt, node: Node, messages: Sequence[BlockGradient]
) -> None:
    """One node's contributions, of which there is one for each chunk."""
    weights = {each.weight for each in messages}
    kinds = {(each.encoding.label, each.operation, each.group) for each in messages}
    weight = messages[0].weight
    right = weights == {weight} and 0 <= weight < math.inf
    right = right and kinds == {("float32", Operation.WEIGHTED_MEAN, 0)}
    evidence = f"{node} has weight {', '.join(map(repr, sorted(weights)))} as {kinds}"
    line.judge("grains.weight", right, evidence)
    chunks = {(each.block, each.offset): each for each in messages}
    vectors = [
        decode(message.payload, message.encoding, message.count)
        for _, message in sorted(chunks.items())
    ]
    attempt.sums[node] = _Sum(vector=np.concatenate(vectors), weight=weight)


async def _averaged(line: ScriptedLine, owned: Iterable[PositionRange]) -> _Attempt:
    """As `_gives`, and then takes the step up to StepReady, whose losses are judged."""
    attempt = await _gives(line, owned)
    current, averages = attempt.current, line.averages(attempt.current)
    mine = sum_in_order(each.weight for each in attempt.sums.values())
    others = attempt.grains.count - sum(map(len, attempt.nodes))

    def made(chunk: Chunk) -> reducer_pb2.AveragedBlock:
        block = averages.made(chunk, steady(chunk))
        block.total_weight = mine + others * attempt.grains.micro_batch
        block.contributors = len(attempt.nodes) + others
        return block

    line.average(current, made)
    ready = await line.must("grains.losses", line.ready(current))
    _judge_losses(line, attempt, ready)
    return attempt


def _judge_losses(line: ScriptedLine, attempt: _Attempt, ready: pb.StepReady) -> None:
    said = [(each.first, each.first + each.grains, each.weight) for each in ready.node_losses]
    sent = [(node.first, node.stop, found.weight) for node, found in attempt.sums.items()]
    finite = all(math.isfinite(each.loss_sum) for each in ready.node_losses)
    evidence = f"first, stop and weight of nodes: {said}, and it contributed {sent}"
    if line.judge("grains.losses", finite and said == sent, evidence):
        for each, (node, found) in zip(ready.node_losses, list(attempt.sums.items()), strict=True):
            known = _Sum(vector=found.vector, weight=found.weight, loss_sum=each.loss_sum)
            attempt.sums[node] = known
    samples = attempt.current.samples
    evidence = f"it reports {ready.samples} samples, and its share has {samples}"
    line.judge("grains.losses", ready.samples == samples, evidence)


def _named(nodes: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, nodes))) or "nothing"


# ---------------------------------------------------------------------- what is no node


async def _abstain(line: ScriptedLine) -> None:
    name = "grains.abstain"
    current = await line.begin(check=name, empty=True)
    line.average(current)
    ready = await line.must(name, line.ready(current))
    right = bool(current.abstained) and not current.given and not ready.node_losses
    evidence = f"{len(current.given)} chunks came, and {len(ready.node_losses)} losses of nodes"
    line.judge(name, right, evidence)
    line.commit(current)


async def _part(bench: Bench, line: ScriptedLine) -> None:
    """All positions of a batch but its first."""
    name = "grains.part"
    grains = grains_of(line)
    if len(grains.positions(0)) == 1:
        bench.verdicts.skip(name, "its grains are single positions")
        return
    await line.asks()
    current = line.assign(positions=(PositionRange(grains.batch.start + 1, grains.batch.stop),))
    event = await line.must(name, line.refusal(current))
    kind = "no Fault" if event.kind != "fault" else pb.FaultKind.Name(event.message.kind)
    evidence = f"{event.kind} came: {kind}"
    line.judge(name, kind == pb.FaultKind.Name(pb.FAULT_KIND_PROTOCOL), evidence)


async def _unable(bench: Bench) -> None:
    """A line whose reducer can't add along the tree."""
    name = "grains.reducer"
    line = await bench.started(IN_GRAINS)
    opened = reducer_pb2.RoundOpened(max_payload_bytes=line.servers[0].max_payload_bytes)
    line.servers[0].opened = reducer_pb2.ReduceResponse(round_opened=opened).SerializeToString()
    await line.asks()
    current = line.assign(positions=(grains_of(line).batch,))
    event = await line.must(name, line.refusal(current))
    line.judge(name, event.kind != "block_gradient", f"{event.kind} came")
