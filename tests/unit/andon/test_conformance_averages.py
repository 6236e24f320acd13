"""Averages and faults: the reducer's core gives what conformance/ says, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    Operation,
    Request,
    TreeNode,
)
from andon.protocol.records import Key
from andon.wire.frames import parse_request
from andon_reducer.core.effects import Effect, Reduce, SendAverage, SendNotice
from andon_reducer.core.events import (
    Abstained,
    ChunkReduced,
    GradientArrived,
    ReduceStreamOpened,
)
from andon_reducer.core.jobs import reduce_chunk
from andon_reducer.core.rounds import Rounds
from unit.andon.golden import golden, naming
from vectors.floats import BFLOAT16, FLOAT16, FLOAT32

pytestmark = pytest.mark.usefixtures("arithmetic")


class Reducing:
    """A reducer's core that does its jobs at once, and remembers what it answers."""

    def __init__(self) -> None:
        self.rounds = Rounds(window_bytes=2**20, max_payload_bytes=2**20)
        self.streams: set[int] = set()
        self.answers: list[tuple[tuple[int, ...], Any]] = []

    def take(self, stream: int, worker: int, request: Request) -> None:
        if stream not in self.streams:
            self.streams.add(stream)
            self.rounds.receive(ReduceStreamOpened(stream, "7f3a", worker), 0.0)
        if isinstance(request, BlockGradient):
            self._do(self.rounds.receive(GradientArrived(stream, request), 0.0))
        elif isinstance(request, Abstain):
            self._do(self.rounds.receive(Abstained(stream, request), 0.0))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reduce):
                answer = reduce_chunk(effect.job)
                fault = answer if isinstance(answer, BlockFault) else None
                for after in self.rounds.receive(ChunkReduced(effect.job.id, fault), 0.0):
                    if isinstance(after, SendAverage):
                        self.answers.append((after.streams, answer))
                    elif isinstance(after, SendNotice):
                        self.answers.append((after.streams, after.notice))
            elif isinstance(effect, SendNotice):
                self.answers.append((effect.streams, effect.notice))


def requests_of(case: dict[str, Any]) -> list[Request]:
    """What the ranks of a case send."""
    key, size = Key(1, 1), len(case["ranks"])
    requests: list[Request] = []
    for rank, given in enumerate(case["ranks"]):
        if given.get("abstains"):
            requests.append(Abstain(key=key, rank=rank, world_size=size))
            continue
        encoding = Encoding[case["encoding"]]
        requests.append(
            BlockGradient(
                key=key,
                rank=rank,
                world_size=size,
                operation=Operation[case.get("operation", "WEIGHTED_MEAN")],
                block=case.get("block", 0),
                offset=case.get("element_offset", 0),
                count=case["element_count"],
                weight=given["weight"],
                payload=memoryview(bytes.fromhex(given["payload"])),
                encoding=encoding,
                answer_encoding=Encoding[case["answer_encoding"]],
            )
        )
    return requests


@pytest.mark.parametrize("backwards", [False, True], ids=["in-order", "backwards"])
def test_c_ddp_001_an_average_is_the_vector_s_in_any_order_of_arrival(backwards: bool) -> None:
    for case in golden("averages"):
        with naming(case):
            _check_average(case, backwards)


def _check_average(case: dict[str, Any], backwards: bool) -> None:
    reducing = Reducing()
    everybody = set(range(len(case["ranks"])))
    arrivals = list(enumerate(requests_of(case)))

    for rank, request in reversed(arrivals) if backwards else arrivals:
        reducing.take(rank, rank, request)

    ((streams, answer),) = reducing.answers
    assert set(streams) == everybody
    assert isinstance(answer, AveragedBlock)
    assert answer.payload.hex() == case["answer"]["payload"]
    assert answer.total_weight == case["answer"]["total_weight"]
    assert answer.contributors == case["answer"]["contributors"]
    assert answer.encoding.name == case["answer_encoding"]


@pytest.mark.parametrize("backwards", [False, True], ids=["in-order", "backwards"])
def test_the_mean_of_nodes_is_the_vector_s_in_any_order_of_arrival(backwards: bool) -> None:
    for case in golden("tree", "means"):
        with naming(case):
            _check_mean_of_nodes(case, backwards)


def _check_mean_of_nodes(case: dict[str, Any], backwards: bool) -> None:
    reducing, key, size = Reducing(), Key(1, 1), len(case["ranks"])
    count = case["element_count"]
    ranks = list(enumerate(case["ranks"]))

    for rank, nodes in reversed(ranks) if backwards else ranks:
        for each in nodes:
            first, stop = each["node"]
            gradient = BlockGradient(
                key=key,
                rank=rank,
                world_size=size,
                block=0,
                offset=0,
                count=count,
                weight=each["weight"],
                payload=memoryview(bytes.fromhex(each["payload"])),
                node=TreeNode(first, stop - first, len(case["grains"]), case["grain"]),
            )
            reducing.take(rank, rank, gradient)

    ((streams, answer),) = reducing.answers
    assert set(streams) == set(range(size))
    assert isinstance(answer, AveragedBlock)
    assert answer.payload.hex() == case["answer"]["payload"]
    assert answer.total_weight == case["answer"]["total_weight"]
    assert answer.contributors == case["answer"]["contributors"]


def test_f_dp_003_what_can_t_be_averaged_is_answered_as_the_vector_says() -> None:
    for case in golden("faults"):
        with naming(case):
            _check_fault(case)


def _check_fault(case: dict[str, Any]) -> None:
    reducing = Reducing()
    if "messages" in case:
        said = [
            (each["stream"], each["worker"], parse_request(bytes.fromhex(each["bytes"])))
            for each in case["messages"]
        ]
    else:
        said = [(rank, rank, request) for rank, request in enumerate(requests_of(case))]

    for stream, worker, request in said:
        reducing.take(stream, worker, request)

    ((streams, fault),) = reducing.answers
    assert isinstance(fault, BlockFault)
    assert set(streams) == {stream for stream, _, _ in said}
    found = {"kind": fault.kind.name, "block": fault.block, "element": fault.element}
    found["value"] = fault.value
    if fault.rank is not None:
        found["rank"] = fault.rank
    expected = case["answer"]
    assert {name: found.get(name) for name in expected} == expected
    assert ("rank" in found) == ("rank" in expected)


def test_wrong_ways_to_add_are_told_apart() -> None:
    wrong = [case for case in golden("averages") if "reversed" in case]
    fused = [case for case in golden("averages") if "with_fma" in case]

    assert {case["encoding"] for case in wrong} >= {"FLOAT32", "FLOAT16", "BFLOAT16"}
    assert fused
    for case in (*wrong, *fused):
        assert case["answer"]["payload"] not in (case.get("reversed"), case.get("with_fma"))


@pytest.mark.parametrize(("form", "kind"), [(FLOAT32, np.float32), (FLOAT16, np.float16)])
def test_the_vectors_arithmetic_reads_and_rounds_as_numpy_does(form: Any, kind: Any) -> None:
    draw = np.random.default_rng(1)
    unsigned = {2: np.uint16, 4: np.uint32}[form.size_bytes]
    bits = draw.integers(0, 2 ** (8 * form.size_bytes), 2000, dtype=np.uint64).astype(unsigned)
    with np.errstate(invalid="ignore"):
        values = bits.view(kind).astype(np.float64)

    for raw, value in zip(bits.tolist(), values.tolist(), strict=True):
        if form.is_finite(raw):
            assert form.round(form.read(raw)) == raw
            assert float(form.read(raw).text) == value
    doubles = draw.standard_normal(2000) * 10.0 ** draw.integers(-9, 4, 2000)
    with np.errstate(over="ignore", under="ignore"):
        rounded = doubles.astype(kind).view(unsigned).tolist()
    assert [form.of(value) for value in doubles.tolist()] == rounded


def test_the_vectors_arithmetic_rounds_to_bfloat16_as_the_formula_does() -> None:
    draw = np.random.default_rng(2)
    bits = draw.integers(0, 0x7F7F0000, 2000, dtype=np.uint64).tolist()

    for raw in bits:
        formula = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
        assert BFLOAT16.round(FLOAT32.read(raw)) == formula
