"""Arenas: what is offered, proved, and refused, and what is left in the folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from andon.host.arena import CAPABILITY, ArenaLayout, folder_identity, map_offer
from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    BlockGradient,
    OpenRound,
    Operation,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
    TreeNode,
)
from andon.protocol.records import Key
from andon_reducer.core.jobs import Job
from andon_reducer.transport.admission import CallRefused
from andon_reducer.transport.arenas import Arenas, StreamMemory
from andon_reducer.transport.averaging import Delivery

ELEMENTS = (40, 7)
PLACES = ArenaLayout(ELEMENTS)
KEY = Key(1, 1)


def opening(folder: Path, **fields: object) -> OpenRound:
    asked = OpenRound("run", 0, b"", (CAPABILITY,), ELEMENTS, folder_identity(folder))
    return replace(asked, **fields)  # type: ignore[arg-type]  # fields of OpenRound


def opened(arenas: Arenas, asked: OpenRound) -> StreamMemory:
    memory = asyncio.run(arenas.open(asked))
    assert isinstance(memory, StreamMemory), memory
    return memory


def proof(folder: Path, memory: StreamMemory, areas: int = 1) -> SharedMemoryMapped:
    """What a worker answers."""
    answer = memory.offered(RoundOpened((), 1))
    assert answer.contributions is not None
    assert answer.averages is not None
    _, mine = map_offer(folder, answer.contributions, PLACES, writable=True, areas=areas)
    _, theirs = map_offer(folder, answer.averages, PLACES, writable=False)
    return SharedMemoryMapped(mine, theirs)


def gradient(block: int, offset: int, count: int, at: int, generation: int = 1) -> BlockGradient:
    return BlockGradient(
        key=KEY,
        rank=0,
        world_size=1,
        block=block,
        offset=offset,
        count=count,
        weight=1.0,
        slice=Slice(at, 4 * count, generation),
    )


def job_of(numbers: list[float], *, key: Key = KEY) -> Job:
    vector = np.array(numbers, np.float32)
    return Job(
        id=1,
        key=key,
        group=0,
        sequence=0,
        operation=Operation.WEIGHTED_MEAN,
        world_size=1,
        block=0,
        offset=2,
        count=vector.size,
        encoding=Encoding.FLOAT32,
        answer_encoding=Encoding.FLOAT32,
        contributions=(
            replace(gradient(0, 2, vector.size, 0), payload=vector.view(np.uint8).data),
        ),
        to_memory=True,
        in_place=True,
    )


def test_names_live_until_all_have_mapped_and_the_first_average_is_written(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path)
    first, second = opened(arenas, opening(tmp_path)), opened(arenas, opening(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3, "one for each worker's numbers, one for averages"
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    first.prove(proof(tmp_path, first))
    Delivery(job_of([1.0]), {1: first})
    assert len(list(tmp_path.iterdir())) == 2, "the second may still come"

    second.prove(proof(tmp_path, second))

    assert list(tmp_path.iterdir()) == []
    assert first.averages is second.averages


def test_a_stream_after_the_first_average_gets_another_memory_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    arenas = Arenas(tmp_path)
    first = opened(arenas, opening(tmp_path))
    first.prove(proof(tmp_path, first))
    Delivery(job_of([1.0]), {1: first})
    late = opened(arenas, opening(tmp_path))
    late.prove(proof(tmp_path, late))

    delivery = Delivery(job_of([5.0, 6.0]), {1: first, 2: late})
    assert [delivery.reduce(part) for part in delivery.parts] == [True]

    at = PLACES.starts[0] + 2 * 4
    assert first.averages is not late.averages
    for stream in (first, late):
        found = np.frombuffer(stream.averages.file.memory, np.float32, 2, at)
        assert found.tolist() == [5.0, 6.0]


def test_a_stream_without_memory_gets_the_same_numbers_as_bytes(tmp_path: Path) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))
    memory.prove(proof(tmp_path, memory))
    delivery = Delivery(job_of([5.0, 6.0]), {1: memory, 2: None})

    assert [delivery.reduce(part) for part in delivery.parts] == [True]

    in_place, as_bytes = delivery.message_for(1), delivery.message_for(2)
    assert in_place.shared_bytes == 8
    assert np.array([5.0, 6.0], np.float32).tobytes() not in in_place.frame
    assert np.array([5.0, 6.0], np.float32).tobytes() in as_bytes.frame
    assert as_bytes.shared_bytes == 0


def test_generations_rise_with_each_exchange(tmp_path: Path) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))

    generations = [memory.averages.place(job_of([1.0], key=key)) for key in (KEY, KEY, Key(1, 2))]

    assert [place[1].generation for place in generations if place] == [1, 1, 2]


def test_a_slice_is_a_view_of_what_the_worker_wrote(tmp_path: Path) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))
    offer = memory.offered(RoundOpened((), 1)).contributions
    assert offer is not None
    mapping, _ = map_offer(tmp_path, offer, PLACES, writable=True)
    memory.prove(proof(tmp_path, memory))
    at = PLACES.starts[1] + 4

    found = memory.resolve(gradient(1, 1, 2, at))
    mapping[at : at + 8] = np.array([3.0, 4.0], np.float32).tobytes()

    assert np.frombuffer(found.payload, np.float32).tolist() == [3.0, 4.0]
    assert found.payload.readonly


@pytest.mark.parametrize(
    "forged",
    [
        gradient(0, 0, 4, at=0),
        gradient(0, 0, 4, at=PLACES.starts[0] + 4),
        gradient(0, 40, 1, at=PLACES.starts[0] + 160),
        gradient(0, 38, 4, at=PLACES.starts[0] + 152),
        gradient(2, 0, 1, at=PLACES.starts[1] + 64),
        gradient(0, 0, 4, at=2**64 - 8),
        gradient(0, 2**64 - 1, 4, at=PLACES.starts[0]),
        gradient(0, 0, 4, at=PLACES.starts[0], generation=0),
        gradient(0, 0, 4, at=PLACES.starts[0], generation=2),
    ],
)
def test_a_forged_slice_is_refused(tmp_path: Path, forged: BlockGradient) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))
    memory.prove(proof(tmp_path, memory))
    memory.resolve(gradient(0, 0, 4, at=PLACES.starts[0], generation=3))

    with pytest.raises(CallRefused, match=r"slice|does not lie"):
        memory.resolve(forged)


def test_each_node_of_a_rank_has_an_area_of_its_own(tmp_path: Path) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path, contribution_areas=3))
    offer = memory.offered(RoundOpened((), 1)).contributions
    assert offer is not None
    assert offer.size_bytes == 3 * PLACES.size_bytes
    mapping, _ = map_offer(tmp_path, offer, PLACES, writable=True, areas=3)
    memory.prove(proof(tmp_path, memory, areas=3))
    places = [area * PLACES.size_bytes + PLACES.starts[1] + 4 for area in range(4)]

    def sent(area: int, node: TreeNode | None) -> BlockGradient:
        return memory.resolve(replace(gradient(1, 1, 2, places[area]), node=node))

    for area in range(3):
        found = sent(area, TreeNode(area, 1, 4, 8))
        mapping[places[area] : places[area] + 8] = np.array([area, 4.0], np.float32).tobytes()
        assert np.frombuffer(found.payload, np.float32).tolist() == [area, 4.0]
    for area, node in ((3, TreeNode(3, 1, 4, 8)), (1, None)):
        with pytest.raises(CallRefused, match="does not lie"):
            sent(area, node)


def test_more_areas_than_the_limit_get_no_memory(tmp_path: Path) -> None:
    refused = asyncio.run(Arenas(tmp_path).open(opening(tmp_path, contribution_areas=17)))

    assert refused == "17 areas for contributions are more than 16: ask for fewer"


def test_a_slice_before_the_proof_is_refused(tmp_path: Path) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))

    with pytest.raises(CallRefused, match="was not mapped"):
        memory.resolve(gradient(0, 0, 4, at=PLACES.starts[0]))


@pytest.mark.parametrize("nonces", [(b"", b""), (bytes(16), bytes(16))])
def test_a_wrong_nonce_proves_nothing(tmp_path: Path, nonces: tuple[bytes, bytes]) -> None:
    memory = opened(Arenas(tmp_path), opening(tmp_path))

    with pytest.raises(CallRefused, match="does not prove"):
        memory.prove(SharedMemoryMapped(*nonces))

    assert not memory.mapped


def test_a_stream_that_ends_removes_its_names(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path)
    first, second = opened(arenas, opening(tmp_path)), opened(arenas, opening(tmp_path))

    first.close()
    assert len(list(tmp_path.iterdir())) == 2
    second.close()

    assert list(tmp_path.iterdir()) == []


def test_another_layout_shares_no_averages(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path)

    first = opened(arenas, opening(tmp_path))
    other = opened(arenas, opening(tmp_path, block_elements=(47,)))

    assert first.averages is not other.averages


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"shared_folder": bytes(16)}, "is not the worker's folder"),
        ({"block_elements": ()}, "has no place"),
        ({"block_elements": (2**47,)}, "MiB free and one arena needs"),
    ],
)
def test_what_can_not_be_shared_is_refused_with_the_reason(
    tmp_path: Path, fields: dict[str, object], why: str
) -> None:
    answer = asyncio.run(Arenas(tmp_path).open(opening(tmp_path, **fields)))

    assert isinstance(answer, str)
    assert why in answer
    assert list(tmp_path.iterdir()) == []


def test_a_reducer_without_a_folder_says_so() -> None:
    answer = asyncio.run(Arenas(None).open(OpenRound("run", 0, b"")))

    assert isinstance(answer, str)
    assert "set ANDON_SHARED_DIR" in answer
