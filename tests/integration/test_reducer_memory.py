"""A reducer and streams that share memory with it: mixed rounds and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from andon.host.arena import CAPABILITY, ArenaLayout, folder_identity, map_offer
from andon.protocol import tokens
from andon.protocol.grains import Node, fold
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Response,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
    StaleRound,
    TreeNode,
)
from andon.protocol.records import Key
from andon.wire.frames import batch_requests, frame_request, parse_responses
from andon_reducer.config import ReducerConfig
from integration.harness import wait_until
from integration.reducer_bench import (
    CHUNK,
    RUN,
    SECRET,
    Reducer,
    Stream,
    chunks_of,
    reason_of,
)

pytestmark = pytest.mark.integration

KEY = Key(1, 1)
ELEMENTS = 5 * CHUNK + 3
PLACES = ArenaLayout((ELEMENTS,))
Floats = npt.NDArray[np.float32]


@pytest.fixture
def reducer(tmp_path: Path) -> Iterator[Reducer]:
    with Reducer(ReducerConfig(shared_dir=tmp_path, chunk_elements=CHUNK)) as reducer:
        yield reducer


class Sharing(Stream):
    """A stream that shares memory with the reducer."""

    def __init__(
        self, port: int, worker: int, folder: Path, *, proved: bool = True, areas: int = 1
    ) -> None:
        super().__init__(port, worker, opened=False)
        self.send(
            OpenRound(
                *(RUN, worker, tokens.session_token(SECRET, RUN, worker), (CAPABILITY,)),
                block_elements=PLACES.elements,
                shared_folder=folder_identity(folder),
                contribution_areas=areas if areas > 1 else 0,
            )
        )
        opened = self.read()
        assert isinstance(opened, RoundOpened)
        assert opened.capabilities == (CAPABILITY,)
        assert opened.contributions is not None
        assert opened.averages is not None
        mine, self.nonce = map_offer(
            folder, opened.contributions, PLACES, writable=True, areas=areas
        )
        theirs, nonce = map_offer(folder, opened.averages, PLACES, writable=False)
        at = PLACES.starts[0]
        self.areas: list[Floats] = [
            np.frombuffer(mine, np.float32, ELEMENTS, area * PLACES.size_bytes + at)
            for area in range(areas)
        ]
        self.mine = self.areas[0]
        self.theirs: Floats = np.frombuffer(theirs, np.float32, ELEMENTS, at)
        if proved:
            self.send(SharedMemoryMapped(self.nonce, nonce))
        self._responses: list[Response] = []

    def read(self) -> Response:
        responses: list[Response] = getattr(self, "_responses", [])
        if not responses:
            responses += parse_responses(next(self.call))
        return responses.pop(0)

    def in_place(self, elements: int) -> Floats:
        """Reads averages until `elements` elements have arrived."""
        while elements:
            answer = self.read()
            assert isinstance(answer, AveragedBlock), answer
            assert answer.slice is not None
            assert answer.slice.offset == PLACES.offset_of(0, answer.offset, answer.count)
            elements -= answer.count
        return self.theirs.copy()


def slice_of(
    rank: int, start: int, count: int, *, world_size: int = 2, key: Key = KEY, generation: int = 1
) -> BlockGradient:
    return BlockGradient(
        key=key,
        rank=rank,
        world_size=world_size,
        block=0,
        offset=start,
        count=count,
        weight=rank + 1.0,
        slice=Slice(PLACES.starts[0] + 4 * start, 4 * count, generation),
    )


def vector(rank: int) -> Floats:
    return np.random.default_rng(rank).standard_normal(ELEMENTS, dtype=np.float32)


def on_the_wire(reducer: Reducer, ranks: int) -> bytes:
    """The mean of the same numbers and weights over the wire, as bytes."""
    streams = [Stream(reducer.port, 10 + rank) for rank in range(ranks)]
    key = Key(1, 10**6)
    for rank, stream in enumerate(streams):
        stream.send(*chunks_of(rank, vector(rank), key=key, world_size=ranks, weight=rank + 1.0))
    answers = [stream.averages(6) for stream in streams]
    for stream in streams:
        stream.__exit__(None, None, None)
    return b"".join(answers[0][offset].payload for offset in sorted(answers[0]))


def test_c_ddp_001_slices_give_the_bits_of_the_wire(reducer: Reducer, tmp_path: Path) -> None:
    with Sharing(reducer.port, 0, tmp_path) as a, Sharing(reducer.port, 1, tmp_path) as b:
        for rank, stream in enumerate((a, b)):
            stream.mine[:] = vector(rank)
            spans = [slice_of(rank, 0, 4 * CHUNK), slice_of(rank, 4 * CHUNK, CHUNK + 3)]
            stream.send_bytes(batch_requests([frame_request(span) for span in spans]))

        means = [stream.in_place(ELEMENTS) for stream in (a, b)]

        assert means[0].tobytes() == means[1].tobytes()
        assert list(tmp_path.iterdir()) == []
    assert means[0].tobytes() == on_the_wire(reducer, 2)


@pytest.mark.parametrize("first", ["wire", "memory"])
def test_c_ddp_001_a_mixed_round_has_the_same_bits_on_both_paths(
    reducer: Reducer, tmp_path: Path, first: str
) -> None:
    with (
        Sharing(reducer.port, 0, tmp_path) as a,
        Stream(reducer.port, 1) as wire,
        Sharing(reducer.port, 2, tmp_path) as c,
    ):
        chunks = chunks_of(1, vector(1), key=KEY, world_size=3, weight=2.0)
        if first == "wire":
            wire.send(*chunks)
        for rank, stream in ((0, a), (2, c)):
            stream.mine[:] = vector(rank)
            stream.send(slice_of(rank, 0, ELEMENTS, world_size=3))
        if first == "memory":
            wire.send(*chunks)

        means = [stream.in_place(ELEMENTS) for stream in (a, c)]
        answers = wire.averages(6)

    as_bytes = b"".join(answers[offset].payload for offset in sorted(answers))
    assert means[0].tobytes() == means[1].tobytes() == as_bytes
    assert as_bytes == on_the_wire(reducer, 3)


@pytest.mark.parametrize("way", ["memory", "wire and memory"])
def test_nodes_in_areas_of_their_own_and_on_the_wire_have_the_bits_of_the_tree(
    reducer: Reducer, tmp_path: Path, way: str
) -> None:
    # Five grains of two positions: rank 0 has the first, the third and the fourth, rank 1 the rest.
    grains = {Node(grain, grain + 1): vector(20 + grain) for grain in range(5)}
    shares = [[(0, 1), (2, 4)], [(1, 2), (4, 5)]]

    def parts(rank: int, stream: Sharing | Stream) -> Iterator[BlockGradient]:
        for area, (first, stop) in enumerate(shares[rank]):
            own = {leaf: it for leaf, it in grains.items() if first <= leaf.first < stop}
            total = fold(own, Node(first, stop), np.add)
            node, weight = TreeNode(first, stop - first, 5, 2), 2.0 * (stop - first)
            if isinstance(stream, Sharing):
                stream.areas[area][:] = total
                sent = slice_of(rank, 0, ELEMENTS, world_size=3)
                assert sent.slice is not None
                at = sent.slice.offset + area * PLACES.size_bytes
                place = replace(sent.slice, offset=at)
                yield replace(sent, slice=place, node=node, weight=weight)
                continue
            for chunk in chunks_of(rank, total, key=KEY, world_size=3, weight=weight):
                yield replace(chunk, node=node)

    with (
        Sharing(reducer.port, 0, tmp_path, areas=2) as a,
        Sharing(reducer.port, 1, tmp_path, areas=2) as shared,
        Stream(reducer.port, 2) as wire,
        Sharing(reducer.port, 3, tmp_path) as idle,
    ):
        b = shared if way == "memory" else wire
        b.send(*sorted(parts(1, b), key=lambda each: each.offset))
        idle.send(Abstain(key=KEY, rank=2, world_size=3))
        a.send(*parts(0, a))

        means = [stream.in_place(ELEMENTS) for stream in (a, idle)]
        if way == "memory":
            means.append(shared.in_place(ELEMENTS))
        else:
            answers = wire.averages(6)
            assert {each.contributors for each in answers.values()} == {4}
            means.append(
                np.frombuffer(
                    b"".join(answers[offset].payload for offset in sorted(answers)), np.float32
                )
            )

    expected = fold(grains, Node(0, 5), np.add) / np.float32(5)
    assert [mean.tobytes() for mean in means] == [expected.tobytes()] * 3


def test_averages_stay_until_every_rank_gave_something_newer(
    reducer: Reducer, tmp_path: Path
) -> None:
    with Sharing(reducer.port, 0, tmp_path) as fast, Sharing(reducer.port, 1, tmp_path) as slow:
        for rank, stream in enumerate((fast, slow)):
            stream.mine[:] = vector(rank)
            stream.send(slice_of(rank, 0, ELEMENTS))
        first = fast.in_place(ELEMENTS)
        slow.in_place(ELEMENTS)

        fast.mine[:] = 7.0
        later = slice_of(0, 0, ELEMENTS, key=Key(1, 2), generation=2)
        fast.send(later)
        fast.send(slice_of(0, 0, CHUNK, generation=2))  # of the old key
        assert isinstance(fast.read(), StaleRound), "the reducer has processed all earlier messages"

        assert slow.theirs.tobytes() == first.tobytes()
        slow.mine[:] = 7.0
        slow.send(slice_of(1, 0, ELEMENTS, key=Key(1, 2), generation=2))
        np.testing.assert_allclose(slow.in_place(ELEMENTS), 7.0, rtol=1e-6)


@pytest.mark.parametrize(
    "forged",
    [
        Slice(0, 4 * CHUNK, 1),
        Slice(PLACES.starts[0] + 4, 4 * CHUNK, 1),
        Slice(2**64 - 4 * CHUNK, 4 * CHUNK, 1),
        Slice(PLACES.starts[0], 4 * CHUNK, 0),
    ],
)
def test_a_forged_slice_ends_its_stream_alone(
    reducer: Reducer, tmp_path: Path, forged: Slice
) -> None:
    good = slice_of(0, 0, CHUNK)
    bad = replace(good, slice=forged)
    with Sharing(reducer.port, 0, tmp_path) as liar, Sharing(reducer.port, 1, tmp_path) as other:
        liar.send(bad)

        assert reason_of(liar.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
        other.send(slice_of(0, 0, ELEMENTS, world_size=1, key=Key(1, 2)))
        other.in_place(ELEMENTS)


def test_a_slice_without_a_proof_is_refused(reducer: Reducer, tmp_path: Path) -> None:
    with Sharing(reducer.port, 0, tmp_path, proved=False) as stream:
        stream.send(slice_of(0, 0, CHUNK))

        assert reason_of(stream.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


def test_a_slice_on_a_stream_that_asked_for_no_memory_is_refused(reducer: Reducer) -> None:
    with Stream(reducer.port, 0) as stream:
        stream.send(slice_of(0, 0, CHUNK))

        assert reason_of(stream.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


def test_a_worker_that_ends_before_it_has_mapped_leaves_no_name(
    reducer: Reducer, tmp_path: Path
) -> None:
    with Sharing(reducer.port, 0, tmp_path, proved=False):
        assert len(list(tmp_path.iterdir())) == 2

    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_full_folder_is_reported_and_the_stream_uses_the_wire(
    reducer: Reducer, tmp_path: Path
) -> None:
    with Stream(reducer.port, 0, opened=False) as stream:
        stream.send(
            OpenRound(
                *(RUN, 0, tokens.session_token(SECRET, RUN, 0), (CAPABILITY,)),
                block_elements=(2**46,),
                shared_folder=folder_identity(tmp_path),
            )
        )
        opened = stream.read()

        assert isinstance(opened, RoundOpened)
        assert opened.contributions is opened.averages is None
        assert "MiB free and one arena needs 268435457 MiB" in opened.shared_memory_refused
        numbers = vector(0)[:CHUNK]
        stream.send(*chunks_of(0, numbers, key=KEY, world_size=1))
        assert stream.averages(1)[0].payload == numbers.tobytes()
