"""Verifying: grains of others computed again, attestations, and the mean of all sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np
import xxhash

from andon.protocol.attestations import SAMPLE_BYTES
from andon.protocol.capabilities import VERIFIES
from andon.protocol.encoding import decode
from andon.protocol.grains import Node, cover, fold, root_divisor
from andon.protocol.layout import Chunk
from andon.protocol.limits import MAX_HASHED_SAMPLES
from andon.protocol.messages import BlockGradient
from andon.protocol.records import PositionRange
from andon.protocol.sums import sum_in_order
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon_conformance.judge.bench import Bench, scenario
from andon_conformance.judge.checks import Stopped
from andon_conformance.judge.line import ScriptedLine
from andon_conformance.judge.rounds import ClientRound, Floats, short, steady
from andon_conformance.judge.scenarios.graining import IN_GRAINS, grains_of, nodes_came
from andon_conformance.judge.streams import ClientCall
from andon_conformance.judge.transcript import Event

__all__ = ["verifying"]

_RANK = 1
"""The client's, in each round; ranks 0 and 2 are the judge's."""
_HASH = 16
_MISSING = np.float32(-0.0).tobytes()

Attested = dict[Node, pb.Attestation]


@dataclass(kw_only=True)
class _Round:
    """A round of which the client attests, and what it contributed and said."""

    current: ClientRound
    own: tuple[PositionRange, ...]
    verifies: tuple[int, ...]
    sums: dict[Node, Floats]
    """What the client contributed."""
    weights: dict[Node, float]
    ready: pb.StepReady = field(default_factory=pb.StepReady)

    @property
    def beside(self) -> tuple[PositionRange, ...]:
        """The grains that it verifies."""
        return tuple(PositionRange(each, each + 1) for each in self.verifies)

    def attested(self, count: int) -> tuple[Attested, Attested]:
        """Of its own, and of what it verifies; of a grain that is both the first one is its own."""
        own: Attested = {}
        others: Attested = {}
        mine = {*_leaves_of(self.own), *cover(self.own, count)}
        for each in self.ready.attested:
            node = _node_of(each)
            (own if node in mine and node not in own else others)[node] = each
        return own, others


@scenario(
    "verification",
    """
    verification.unasked   section 37  attests nothing in a round that does not ask
    verification.apart     section 37  contributes and counts nothing of what it verifies
    verification.attested  section 37  attests each grain and each maximal node, of its own and of
                                       what it verifies, and nothing else
    verification.digests   section 37  attests of its own nodes what it contributed
    verification.again     section 37  computes a grain of another worker as its owner does
    verification.samples   section 37  hashes each sample of a grain, alike as owner and verifier
    verification.items     section 37  gives hashes of components where they are asked for
    verification.anew      section 37  computes a grain of its own twice in an inquest
    verification.averages  section 37  gives the digest of the averages
    verification.relays    section 37  sends each relayed sum of its own again, by itself, and
                                       abstains from the others
    verification.mean      section 37  compares the averages with the mean of all sums, and names
                                       the first element that differs
    """,
)
async def verifying(bench: Bench) -> None:
    """Two rounds that exchange what is own and verified, an inquest, and sums that are relayed."""
    line = await bench.started(IN_GRAINS)
    grains = grains_of(line) if line.plan.grain else None
    lacks = "its plan has no grain" if grains is None else ""
    if grains is not None and VERIFIES not in line.join.capabilities:
        lacks = f"it does not offer {VERIFIES}"
    elif grains is not None and grains.count < 2:
        lacks = "its batch is a single grain"
    if grains is None or lacks:
        bench.verdicts.skip_undecided(lacks)
        return
    await _unasked(line)
    half = (grains.count + 1) // 2
    left, right = (PositionRange(0, half),), (PositionRange(half, grains.count),)
    first = await _verified(line, left, range(half, grains.count))
    line.void(first.current)
    second = await _verified(line, right, range(half))
    line.void(second.current)
    _compare(line, first, second)
    await _inquest(line, left, half)
    # A client that computes otherwise than others makes another mean of what it has computed.
    if all(map(bench.verdicts.holds, ("verification.digests", "verification.again"))):
        await _means(line, left, first, second)


async def _unasked(line: ScriptedLine) -> None:
    """A round like any other."""
    grains = grains_of(line)
    attempt = await _gives(line, (PositionRange(0, grains.count),), ())
    line.average(attempt.current, _averages(line, attempt, _made_up(line)))
    ready = await line.ready(attempt.current)
    said = len(ready.attested) + len(ready.averages_digest) + ready.HasField("mean_check")
    line.judge("verification.unasked", not said, f"{len(ready.attested)} attestations came")
    line.void(attempt.current)


# ---------------------------------------------------------------------- one round


async def _gives(
    line: ScriptedLine,
    own: Sequence[PositionRange],
    verifies: Iterable[int],
    more: pb.ShardAssignment | None = None,
) -> _Round:
    """Assigns grains, and waits for the sums of the client's own ones."""
    await line.asks()
    grains, verifies = grains_of(line), tuple(verifies)
    terms = pb.ShardAssignment(attests=bool(verifies), verifies=verifies)
    if more is not None:
        terms.MergeFrom(more)
    current = line.assign(positions=grains.ranges(own), more=terms)
    nodes = cover(own, grains.count)
    await line.must("verification.apart", nodes_came(line, current, len(nodes)))
    messages = [given.message for given in current.given]
    found = {None if each.node is None else each.node.node for each in messages}
    evidence = f"{sorted(map(str, found))} came, and its own nodes are {sorted(map(str, nodes))}"
    if not line.judge("verification.apart", found == set(nodes), evidence):
        raise Stopped("the client's contributions are not the nodes of its own grains")
    of_nodes = {node: [each for each in messages if _is_of(each, node)] for node in nodes}
    return _Round(
        current=current,
        own=tuple(own),
        verifies=verifies,
        sums={node: _vector(each) for node, each in of_nodes.items()},
        weights={node: each[0].weight for node, each in of_nodes.items()},
    )


async def _verified(
    line: ScriptedLine,
    own: Sequence[PositionRange],
    verifies: Iterable[int],
    more: pb.ShardAssignment | None = None,
) -> _Round:
    """A round up to StepReady, with made-up averages; judges what is attested of it."""
    round_ = await _gives(line, own, verifies, more)
    numbers = _made_up(line)
    line.average(round_.current, _averages(line, round_, numbers))
    round_.ready = await line.must("verification.attested", line.ready(round_.current))
    _judge_attested(line, round_)
    found, right = round_.ready.averages_digest, _digest(line, numbers)
    evidence = f"it says {short(found)}, and the averages have {short(right)}"
    line.judge("verification.averages", found == right, evidence)
    return round_


def _judge_attested(line: ScriptedLine, round_: _Round) -> None:
    count = grains_of(line).count
    wanted = Counter(_leaves_of(round_.own)) + Counter(_leaves_of(round_.beside))
    sums = {*cover(round_.own, count), *cover(round_.beside, count)}
    wanted += Counter(node for node in sums if len(node) > 1)
    given = Counter(_node_of(each) for each in round_.ready.attested)
    odd = sorted((wanted - given) + (given - wanted))
    evidence = f"{given.total()} attestations came in place of {wanted.total()}"
    evidence += f", and differ in {odd[0]}" if odd else ""
    if not line.judge("verification.attested", not odd, evidence):
        raise Stopped("the client does not attest what it was asked for")
    current, ready = round_.current, round_.ready
    counts = ready.samples == current.samples and ready.weight == sum_in_order(
        round_.weights.values()
    )
    losses = [Node(each.first, each.first + each.grains) for each in ready.node_losses]
    evidence = f"it counts {ready.samples} samples of {current.samples}, and nodes {losses}"
    line.judge("verification.apart", counts and losses == list(round_.sums), evidence)
    own, _ = round_.attested(count)
    for node, vector in round_.sums.items():
        found, right = own[node].digest, _digest(line, vector)
        evidence = f"{node} is attested as {short(found)}, and contributed as {short(right)}"
        line.judge("verification.digests", found == right, evidence)


def _compare(line: ScriptedLine, first: _Round, second: _Round) -> None:
    """What one round verifies, the other one owns."""
    grains = grains_of(line)
    for owner, verifier in ((first, second), (second, first)):
        (own, _), (_, others) = owner.attested(grains.count), verifier.attested(grains.count)
        odd = [node for node in others if others[node].digest != own[node].digest]
        evidence = f"{len(odd)} of {len(others)} nodes have other digests"
        evidence += f", the first is {odd[0]}" if odd else ""
        line.judge("verification.again", not odd, evidence)
    if not line.verdicts.holds("verification.again"):
        return
    size = 0 if len(grains.batch) > MAX_HASHED_SAMPLES else SAMPLE_BYTES
    for owner, verifier in ((first, second), (second, first)):
        (own, _), (_, others) = owner.attested(grains.count), verifier.attested(grains.count)
        for node, each in others.items():
            lengths = {SAMPLE_BYTES, size * len(grains.positions(node.first))}
            fits = len(each.samples) in lengths if len(node) == 1 else not each.samples
            evidence = f"{len(each.samples)} bytes of samples came for {node}"
            line.judge("verification.samples", fits, evidence)
            alike = each.samples == own[node].samples
            line.judge("verification.samples", alike, f"those of {node} differ: {not alike}")


async def _inquest(line: ScriptedLine, own: Sequence[PositionRange], half: int) -> None:
    """A grain of its own and one of another worker are computed anew, with all components."""
    grains = grains_of(line)
    terms = pb.ShardAssignment(anew=True, itemised=True)
    round_ = await _verified(line, own, (0, half), terms)
    line.void(round_.current)
    mine, others = round_.attested(grains.count)
    parts = sum(len(block.components) for block in line.layout.blocks)
    for node, each in [*mine.items(), *others.items()]:
        _judge_items(line, each, parts if node in (Node(0, 1), Node(half, half + 1)) else 0)
    if line.verdicts.holds("verification.again"):
        again = others[Node(0, 1)].digest == mine[Node(0, 1)].digest
        line.judge("verification.anew", again, f"grain 0 was computed alike: {again}")


def _judge_items(line: ScriptedLine, said: pb.Attestation, parts: int) -> None:
    found = len(said.components)
    right = found == _HASH * parts
    right = right and (not found or xxhash.xxh3_128_digest(said.components) == said.digest)
    evidence = f"{found} bytes of hashes came for {_node_of(said)}, of {parts} components"
    line.judge("verification.items", right, evidence)


# ---------------------------------------------------------------------- the mean of all sums


async def _means(
    line: ScriptedLine, own: Sequence[PositionRange], first: _Round, second: _Round
) -> None:
    """Two rounds with relayed sums: an element of the first one's averages is wrong."""
    grains = grains_of(line)
    sums, weights = first.sums | second.sums, first.weights | second.weights
    weight = fold(weights, grains.root, add)
    with np.errstate(all="ignore"):
        root = fold(sums, grains.root, np.add)
        mean = root / root_divisor(weight, grains.micro_batch, grains.count)
    wrong = mean.copy()
    place = len(wrong) // 2
    wrong.view(np.uint32)[place] ^= 1
    for numbers in (wrong, mean):
        await _mean(line, own, sums, weight, (mean, numbers))


async def _mean(
    line: ScriptedLine,
    own: Sequence[PositionRange],
    sums: Mapping[Node, Floats],
    weight: float,
    means: tuple[Floats, Floats],
) -> None:
    """One round: the mean, and what comes in its place."""
    mine = cover(own, grains_of(line).count)
    # Of the others' nodes the client verifies the first one; the rest comes from their owner.
    verified = next(node for node in sorted(sums) if node not in mine)
    owners = [(node, _RANK if node in mine else 2, node != verified) for node in sorted(sums)]
    terms = pb.ShardAssignment(
        sums=[
            pb.NodeOwner(first=node.first, grains=len(node), rank=rank, relayed=relayed)
            for node, rank, relayed in owners
        ]
    )
    round_ = await _gives(line, own, range(verified.first, verified.stop), terms)
    current, (mean, came) = round_.current, means
    line.average(current, _averages(line, round_, came, weight))
    relayed = [(node, rank) for node, rank, relayed in owners if relayed]
    for sequence, (node, rank) in enumerate(relayed, start=1):
        await line.must("verification.relays", _relayed(line, round_, sequence, sums[node], rank))
    round_.ready = await line.must("verification.mean", line.ready(current))
    line.void(current)
    said = round_.ready.mean_check
    right = pb.MeanCheck(
        expected=_of_blocks(line, mean),
        came=_of_blocks(line, came),
        relayed=[_digest(line, sums[node]) for node, _ in relayed],
    )
    apart = np.flatnonzero(mean.view(np.uint32) != came.view(np.uint32))
    if len(apart):
        block, element = _place(line, int(apart[0]))
        right.apart.block, right.apart.element = block, element
        right.apart.expected, right.apart.came = float(mean[apart[0]]), float(came[apart[0]])
    evidence = f"it says {_told(said)} in place of {_told(right)}"
    line.judge("verification.mean", said == right, evidence)


async def _relayed(
    line: ScriptedLine, round_: _Round, sequence: int, vector: Floats, rank: int
) -> None:
    """One exchange of a sum: the client contributes it, or abstains, and gets it."""
    current, chunks = round_.current, line.chunks()
    came: list[Event] = []

    def complete(event: Event) -> bool:
        message = event.message
        if event.kind in ("block_gradient", "abstain") and message.key == current.key:
            came.extend([event] if message.sequence == sequence else [])
        return bool(came) and (came[-1].kind == "abstain" or len(came) == len(chunks))

    await line.transcript.wait(f"exchange {sequence} of the round", complete, current.began)
    messages = [event.message for event in came]
    if rank == _RANK:
        kinds = {event.kind for event in came} == {"block_gradient"}
        plain = kinds and all(each.node is None and each.weight == 1 for each in messages)
        right = plain and np.array_equal(_vector(messages).view(np.uint32), vector.view(np.uint32))
        evidence = f"exchange {sequence}: {len(came)} messages came, with its sum as it was: "
        line.judge("verification.relays", right, f"{evidence}{right}")
    else:
        kind = came[0].kind
        line.judge("verification.relays", kind == "abstain", f"exchange {sequence}: {kind} came")
    streams: dict[str, ClientCall] = {event.stream.address: event.stream for event in came}
    (stream,) = streams.values()
    made = _averages(line, round_, vector, 1.0)
    for chunk in chunks:
        block = made(chunk)
        block.sequence, block.contributors = sequence, 1
        stream.send(reducer_pb2.ReduceResponse(averaged_block=block))


# ---------------------------------------------------------------------- numbers and hashes


def _is_of(message: BlockGradient, node: Node) -> bool:
    return message.node is not None and message.node.node == node


def _vector(messages: Iterable[BlockGradient]) -> Floats:
    """The numbers of chunks, in the layout's order."""
    chunks = {(each.block, each.offset): each for each in messages}
    parts = [decode(each.payload, each.encoding, each.count) for _, each in sorted(chunks.items())]
    return np.concatenate(parts)


def _made_up(line: ScriptedLine) -> Floats:
    return np.concatenate([steady(chunk) for chunk in line.chunks()])


def _averages(
    line: ScriptedLine, round_: _Round, numbers: Floats, weight: float | None = None
) -> Callable[[Chunk], reducer_pb2.AveragedBlock]:
    """Makes a round's averages of numbers for the whole model; `weight` is their total."""
    averages, grains = line.averages(round_.current), grains_of(line)
    if weight is None:
        others = grains.count - sum(map(len, round_.sums))
        weight = sum(round_.weights.values()) + others * grains.micro_batch
    starts = _starts(line)

    def made(chunk: Chunk) -> reducer_pb2.AveragedBlock:
        at = starts[chunk.block] + chunk.offset
        block = averages.made(chunk, numbers[at : at + chunk.count])
        block.total_weight = weight
        return block

    return made


def _starts(line: ScriptedLine) -> list[int]:
    """Where each block begins in the vector of the model, and where the last one ends."""
    sizes = [block.elements for block in line.layout.blocks]
    return [0, *accumulate(sizes)]


def _place(line: ScriptedLine, element: int) -> tuple[int, int]:
    starts = _starts(line)
    block = next(at for at in range(len(starts) - 1) if element < starts[at + 1])
    return block, element - starts[block]


def _digest(line: ScriptedLine, vector: Floats) -> bytes:
    """The digest of a sum; a component that begins with -0.0 is absent."""
    sizes = [part.elements for block in line.layout.blocks for part in block.components]
    pieces = np.split(vector, list(accumulate(sizes))[:-1])
    data = (each.tobytes() for each in pieces)
    absent = (b"" if each[: len(_MISSING)] == _MISSING else each for each in data)
    return xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, absent)))


def _of_blocks(line: ScriptedLine, vector: Floats) -> bytes:
    """The digest of a mean, by blocks."""
    pieces = np.split(vector, _starts(line)[1:-1])
    hashes = (xxhash.xxh3_128_digest(each.tobytes()) for each in pieces)
    return xxhash.xxh3_128_digest(b"".join(hashes))


def _leaves_of(runs: Iterable[PositionRange]) -> Iterable[Node]:
    return (Node(at, at + 1) for run in runs for at in range(run.start, run.stop))


def _node_of(said: pb.Attestation) -> Node:
    return Node(said.first, said.first + said.grains)


def _told(said: pb.MeanCheck) -> str:
    apart = said.apart if said.HasField("apart") else None
    where = "nothing apart" if apart is None else f"element {apart.element} of block {apart.block}"
    digests = ", ".join(map(short, (said.expected, said.came, *said.relayed)))
    return f"[{digests}; {where}]"
