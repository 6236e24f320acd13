"""A reducer's socket beside shared memory: what comes over it, in which order, and what may not."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from andon.host.arena import (
    CAPABILITY,
    SOCKET_CAPABILITY,
    ArenaLayout,
    folder_identity,
    map_offer,
    short_path,
    socket_of,
)
from andon.protocol import tokens
from andon.protocol.messages import (
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Request,
    Response,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
)
from andon.protocol.records import Key
from andon.wire.frames import batch_requests, frame_request, parse_responses
from andon.wire.socket_frames import SocketFrames, socket_frame
from andon_reducer.config import ReducerConfig
from integration.harness import wait_until
from integration.reducer_bench import PATIENCE_S, RUN, SECRET, Reducer, Stream, reason_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

BLOCKS = 8
PLACES = ArenaLayout((16,) * BLOCKS)


@pytest.fixture
def reducer(tmp_path: Path) -> Iterator[Reducer]:
    # A window that holds two slices.
    with Reducer(ReducerConfig(shared_dir=tmp_path, window_bytes=400)) as reducer:
        yield reducer


class Socketed(Stream):
    """A stream that shares memory and was offered a socket; it has not connected."""

    def __init__(self, port: int, worker: int, folder: Path) -> None:
        super().__init__(port, worker, opened=False)
        self.send(
            OpenRound(
                RUN,
                worker,
                tokens.session_token(SECRET, RUN, worker),
                (CAPABILITY, SOCKET_CAPABILITY),
                block_elements=PLACES.elements,
                shared_folder=folder_identity(folder),
            )
        )
        opened = self.read()
        assert isinstance(opened, RoundOpened)
        assert opened.capabilities == (SOCKET_CAPABILITY, CAPABILITY)
        assert opened.contributions is not None
        assert opened.averages is not None
        self.path = socket_of(folder / opened.contributions.name)
        self.memory, mine = map_offer(folder, opened.contributions, PLACES, writable=True)
        _, theirs = map_offer(folder, opened.averages, PLACES, writable=False)
        self.proof = SharedMemoryMapped(mine, theirs)
        self._frames = SocketFrames()
        self._responses: list[Response] = []

    def connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        with short_path(self.path) as short:
            connection.connect(short)
        return connection

    def averages_over(self, connection: socket.socket, count: int) -> list[int]:
        """The blocks of the next averages, as they come over the socket."""
        while len(self._responses) < count:
            data = connection.recv(2**16)
            assert data, self.error()
            self._frames.put(data)
            while self._frames.whole:
                self._responses += parse_responses(self._frames.take())
        taken, self._responses = self._responses[:count], self._responses[count:]
        assert all(isinstance(each, AveragedBlock) for each in taken), taken
        return [each.block for each in taken if isinstance(each, AveragedBlock)]


def over_socket(*messages: Request) -> bytes:
    return b"".join(socket_frame(frame_request(each)) for each in messages)


def slices(rank: int, world_size: int = 2) -> list[BlockGradient]:
    return [
        BlockGradient(
            key=Key(1, 1),
            rank=rank,
            world_size=world_size,
            block=block,
            offset=0,
            count=16,
            weight=1.0,
            slice=Slice(PLACES.starts[block], 64, 1),
        )
        for block in range(BLOCKS)
    ]


def test_a_round_beyond_the_window_comes_and_goes_over_sockets_in_order(
    reducer: Reducer, tmp_path: Path
) -> None:
    with (
        Socketed(reducer.port, 0, tmp_path) as a,
        Socketed(reducer.port, 1, tmp_path) as b,
        a.connected() as to_a,
        b.connected() as to_b,
    ):
        assert stat.S_IMODE(a.path.stat().st_mode) == 0o600
        # All of it at once: the reducer takes two slices, and pauses the stream.
        to_a.sendall(over_socket(a.proof, *slices(0)))
        # Cut anywhere, and in batches.
        first, *others = slices(1)
        batch = socket_frame(batch_requests([frame_request(each) for each in others]))
        data = over_socket(b.proof, first) + batch
        for at in range(0, len(data), 100):
            to_b.sendall(data[at : at + 100])

        assert a.averages_over(to_a, BLOCKS) == [*range(BLOCKS)]
        assert b.averages_over(to_b, BLOCKS) == [*range(BLOCKS)]
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_connect_uses_grpc(reducer: Reducer, tmp_path: Path) -> None:
    with Socketed(reducer.port, 0, tmp_path) as stream:
        stream.send(stream.proof, slices(0, 1)[0])

        assert isinstance(parse_responses(next(stream.call))[0], AveragedBlock)
        assert list(tmp_path.iterdir()) == []


def test_a_message_over_grpc_after_one_over_the_socket_is_refused(
    reducer: Reducer, tmp_path: Path
) -> None:
    with Socketed(reducer.port, 0, tmp_path) as stream, stream.connected() as connection:
        first, second, *_ = slices(0, 1)
        connection.sendall(over_socket(stream.proof, first))
        assert stream.averages_over(connection, 1) == [0]

        stream.send(second)

        assert reason_of(stream.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


@pytest.mark.parametrize(
    "forged",
    [over_socket(slices(0)[0]), (2**31).to_bytes(4, "little"), socket_frame(b"\xff")],
    ids=["no proof", "too long", "no message"],
)
def test_what_may_not_come_over_a_socket_ends_its_stream(
    reducer: Reducer, tmp_path: Path, forged: bytes
) -> None:
    with Socketed(reducer.port, 0, tmp_path) as stream, stream.connected() as connection:
        connection.sendall(forged)

        assert reason_of(stream.error()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
        assert connection.recv(1) == b""
    wait_until(lambda: not list(tmp_path.iterdir()))
