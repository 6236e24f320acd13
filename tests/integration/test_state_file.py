"""A state goes through a file between workers of one host, and as bytes wherever that can't be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from andon.protocol import tokens
from andon.v1 import record_pb2, reducer_pb2
from andon_reducer.config import ReducerConfig
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.control.transfer import PartialState, receive_state, send_state
from integration.cut import Cable
from integration.reducer_bench import RUN, SECRET, Reducer, connect, reason_of
from integration.state_moves import GIVEN, MIB, PATIENCE_S, STATE, nobody, nothing, ticket

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def reducer() -> Iterator[Reducer]:
    with Reducer(ReducerConfig()) as served:
        yield served


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def moved(
    reducer: Reducer, threads: ThreadPoolExecutor, sender: Path | None, receiver: Path | None
) -> int:
    """Moves the state; returns how many bytes came over the receiver's connection."""
    with Cable(reducer.port) as cable:
        mine = ticket(f"127.0.0.1:{reducer.port}", 0, folder=sender)
        sent = threads.submit(send_state, mine, GIVEN, nothing, nobody)
        got = receive_state(
            ticket(cable.address, 1, folder=receiver), PartialState(), nothing, nobody
        )
        sent.result(PATIENCE_S)
    assert got == STATE
    return cable.carried_bytes


def test_between_two_workers_of_a_host_no_byte_of_a_state_passes_the_reducer(
    reducer: Reducer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    assert moved(reducer, threads, tmp_path, tmp_path) < MIB // 16

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["another folder", "the sender has none", "the receiver has none"])
def test_a_state_that_can_not_go_through_a_file_goes_as_bytes(
    reducer: Reducer, threads: ThreadPoolExecutor, tmp_path: Path, case: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    sender = {"another folder": other, "the sender has none": None}.get(case, tmp_path)
    receiver = None if case == "the receiver has none" else tmp_path

    assert moved(reducer, threads, sender, receiver) > len(STATE)

    assert list(tmp_path.iterdir()) == [other]


def test_a_receiver_that_was_cut_off_reads_the_rest_from_another_file(
    reducer: Reducer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    address, arrived = f"127.0.0.1:{reducer.port}", PartialState()
    ends: list[Callable[[], object]] = []

    def watch(act: Callable[[], object] | None) -> None:
        if act is not None:
            ends.append(act)

    def cut(so_far: int, _whole: int) -> None:
        if so_far > 4 * MIB:
            ends[0]()

    sent = threads.submit(send_state, ticket(address, 0, folder=tmp_path), GIVEN, nothing, nobody)
    with pytest.raises(grpc.RpcError):
        receive_state(ticket(address, 1, folder=tmp_path), arrived, cut, watch)
    sent.exception(PATIENCE_S)  # Perhaps it had written all of it by then.
    first: list[int] = []
    held = len(arrived.data)
    assert 4 * MIB < held < len(STATE)

    again = ticket(address, 0, 2, folder=tmp_path)
    sent = threads.submit(send_state, again, GIVEN, lambda so_far, _: first.append(so_far), nobody)
    got = receive_state(replace(again, worker=1, session_token=token(1)), arrived, nothing, nobody)

    sent.result(PATIENCE_S)
    assert got == STATE
    assert first[0] > held
    assert list(tmp_path.iterdir()) == []


def token(worker: int) -> bytes:
    return tokens.session_token(SECRET, RUN, worker)


def said(*pieces: reducer_pb2.PutStateRequest) -> Iterator[reducer_pb2.PutStateRequest]:
    """What a sender says that is no worker of Andon's."""
    yield reducer_pb2.PutStateRequest(
        run_id=RUN,
        worker=0,
        session_token=token(0),
        transfer_id=1,
        head=record_pb2.Key(term=7, round=3),
        size_bytes=len(STATE),
        sha256=hashlib.sha256(STATE).digest(),
    )
    yield from pieces


def put(reducer: Reducer, *pieces: reducer_pb2.PutStateRequest) -> None:
    with connect(reducer.port) as channel:
        call = channel.stream_stream(
            "/andon.v1.Reducer/PutState",
            request_serializer=reducer_pb2.PutStateRequest.SerializeToString,
            response_deserializer=reducer_pb2.PutStateResponse.FromString,
        )
        list(call(said(*pieces), timeout=PATIENCE_S))


@pytest.mark.parametrize(
    ("size", "why"),
    [(len(STATE), "ends 25165824 bytes early"), (2**60, "state is longer than its size_bytes")],
)
def test_a_sender_that_has_written_nothing_where_it_says_is_found_out(
    reducer: Reducer, threads: ThreadPoolExecutor, tmp_path: Path, size: int, why: str
) -> None:
    lies = threads.submit(put, reducer, reducer_pb2.PutStateRequest(file_bytes=size))
    receiver = ticket(f"127.0.0.1:{reducer.port}", 1, folder=tmp_path)

    with pytest.raises((StateCorrupt, grpc.RpcError)) as raised:
        receive_state(receiver, PartialState(), nothing, nobody)

    error = lies.exception(PATIENCE_S)
    assert why in f"{raised.value} {error}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("both", [True, False])
def test_a_piece_lies_in_a_file_that_the_receiver_named_and_nowhere_else(
    reducer: Reducer, threads: ThreadPoolExecutor, tmp_path: Path, *, both: bool
) -> None:
    lies = reducer_pb2.PutStateRequest(file_bytes=9, payload=b"nine" if both else b"")
    sent = threads.submit(put, reducer, lies)
    receiver = ticket(f"127.0.0.1:{reducer.port}", 1, folder=tmp_path if both else None)

    with pytest.raises(grpc.RpcError):
        receive_state(receiver, PartialState(), nothing, nobody)

    error = sent.exception(PATIENCE_S)
    assert isinstance(error, grpc.RpcError)
    assert reason_of(error) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


@pytest.mark.parametrize(
    ("folder", "name"),
    [(bytes(16), ""), (b"", "andon-state"), (bytes(3), "a"), (bytes(16), "a" * 65)],
)
def test_a_file_needs_a_name_and_its_folder(reducer: Reducer, folder: bytes, name: str) -> None:
    request = reducer_pb2.GetStateRequest(
        run_id=RUN, worker=1, session_token=token(1), shared_folder=folder, file_name=name
    )

    with connect(reducer.port) as channel:
        call = channel.unary_stream(
            "/andon.v1.Reducer/GetState",
            request_serializer=reducer_pb2.GetStateRequest.SerializeToString,
            response_deserializer=reducer_pb2.GetStateResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as raised:
            list(call(request, timeout=PATIENCE_S))

    assert reason_of(raised.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")
