"""State transfers: a replica's whole state, in pieces, through the reducer.

If a transfer is cut off, the receiver keeps what came. If the next transfer is of the same bytes,
it continues where the last one ended, whichever worker sends it. A state ends with the weights that
no worker trains (the base). A receiver that holds the same ones does not get them again. The state
is installed whole, after its SHA-256 was checked, or not at all (rule 10).

Between two workers of one host the bytes go through a file: see `state_file`.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc

from andon.host.arena import SharedMemoryUnavailable
from andon.host.keepalive import Options
from andon.host.logs import LogEvent
from andon.host.tls import TlsError
from andon.protocol.pieces import LEAST_PIECE_BYTES, next_piece_bytes
from andon.protocol.records import Key
from andon.v1 import reducer_pb2 as pb
from andon.v1.reducer_pb2_grpc import ReducerStub
from andon.wire import conversion
from andon_trainer.core.events import TransferAsked
from andon_trainer.errors import StateCorrupt
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.packed_state import PackedState
from andon_trainer.exchange.control.state_file import (
    FILE_PIECE_BYTES,
    LEAST_BYTES,
    FileWriter,
    StateFile,
)

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "PackedCut",
    "PartialState",
    "State",
    "StateCut",
    "StateMover",
    "SyncProgress",
    "Ticket",
    "packed",
    "persistently",
    "receive_state",
    "say_why",
    "send_state",
    "ticket_of",
]

log = logging.getLogger(__name__)

_SHOW_EVERY_S = 0.25

_MAY_PASS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,  # The other end is gone, perhaps for a moment.
    grpc.StatusCode.INVALID_ARGUMENT,  # The reducer has not noticed that the last call is over.
)
_MOST_IN_VAIN = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_Result = TypeVar("_Result")

_RECEIVES_LITTLE = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**17))
"""No more than this and a piece is on its way at once: on a slow link pings wait behind it, until
the reducer takes this worker for lost. On a fast one it costs some of the rate."""

Progress = Callable[[int, int], None]
"""Called after each piece, with the bytes so far and the bytes in all."""

Watch = Callable[[Callable[[], object] | None], None]
"""Gets the function that ends a call early, and None once the call is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What either end identifies itself with to the reducer."""

    address: str
    run_id: str
    worker: int
    session_token: bytes = field(repr=False)
    transfer_id: int
    head: Key
    tls: Path | None = None
    """The folder of certificates; None: the transfer is not encrypted."""
    shared_dir: Path | None = None
    """Where bytes may go to a worker of this host; None: nowhere."""


class SyncProgress:
    """Shows in the heartbeats how far a transfer is, a few times a second."""

    def __init__(self, show: Callable[[str, str], None], *, sends: bool) -> None:
        """`show` takes an activity and a text."""
        self._show = show
        self._verb = "sent" if sends else "received"
        self._began_at = time.monotonic()
        self._first: int | None = None
        """Bytes that an earlier transfer left: they don't count for the rate."""
        self._next_at = self._began_at + _SHOW_EVERY_S

    def __call__(self, so_far: int, whole: int) -> None:
        """Notes that `so_far` of `whole` bytes are here."""
        now = time.monotonic()
        if self._first is None:
            self._first = so_far
        if now >= self._next_at:
            self._next_at = now + _SHOW_EVERY_S
            rate = (so_far - self._first) / 1e6 / (now - self._began_at)
            text = (
                f"{self._verb} {so_far / 1e6:.0f} of {whole / 1e6:.0f} MB of state, {rate:.1f} MB/s"
            )
            self._show("SYNCING", text)


@dataclass(slots=True)
class PartialState:
    """The part of a state that has arrived, over one transfer or several."""

    data: bytearray = field(default_factory=bytearray)
    sha256: bytes = b""
    """The digest of the whole state that `data` is the beginning of, as announced."""
    _hash: _Hash = field(default_factory=hashlib.sha256, repr=False, compare=False)

    @property
    def is_right(self) -> bool:
        """Whether `data` is the whole state."""
        return self._hash.digest() == self.sha256

    def add(self, piece: bytes | memoryview) -> None:
        """Appends a piece, and hashes it while the next one is on its way."""
        self.data += piece
        self._hash.update(piece)

    def clear(self) -> None:
        """Forgets it."""
        self.data = bytearray()
        self.sha256 = b""
        self._hash = hashlib.sha256()


def send_state(ticket: Ticket, state: PackedState, progress: Progress, watch: Watch) -> None:
    """Sends the part of `state` that the other end lacks; returns once that has taken it.

    Args:
        ticket: of this transfer.
        state: all of it.
        progress: see `Progress`.
        watch: see `Watch`.

    Raises:
        StateCorrupt: the other end claims to hold more than there is.
        grpc.RpcError: the other end is gone, or `watch` ended the call.
    """
    # gRPC's sending thread runs `pieces`. It waits there until the receiver has said where to
    # start, or until this thread says that there is nothing to send.
    wanted: queue.SimpleQueue[tuple[range, pb.PutStateResponse] | None] = queue.SimpleQueue()
    # Here, and not in `pieces`: this thread may be one of low priority.
    sha256, base_sha256 = state.sha256(), state.base_sha256()

    def pieces() -> Iterator[pb.PutStateRequest]:
        yield pb.PutStateRequest(
            run_id=ticket.run_id,
            worker=ticket.worker,
            session_token=ticket.session_token,
            transfer_id=ticket.transfer_id,
            head=conversion.key_to_proto(ticket.head),
            size_bytes=len(state),
            sha256=sha256,
            base_bytes=state.base_bytes,
            base_sha256=base_sha256,
        )
        asked = wanted.get()
        if asked is None:
            return
        part, answer = asked
        begin = part.start
        for end in _written(ticket, state, part, answer):
            yield pb.PutStateRequest(file_bytes=end - begin)
            progress(end, part.stop)
            begin = end
        first, size, sent_at = begin, LEAST_PIECE_BYTES, time.monotonic()
        while begin < part.stop:
            end = min(begin + size, part.stop)
            yield pb.PutStateRequest(payload=b"".join(state.views(begin, end)))
            progress(end, part.stop)
            begin, now = end, time.monotonic()
            size = next_piece_bytes(size, now - sent_at, end - first)
            sent_at = now

    with open_channel(ticket.address, ticket.tls) as channel:
        call = ReducerStub(channel).PutState(pieces())
        watch(call.cancel)
        try:
            for answer in call:
                stop = len(state) - answer.base_bytes
                if answer.offset > stop or answer.base_bytes not in (0, state.base_bytes):
                    raise StateCorrupt(f"asked for bytes {answer.offset} to {stop} of {len(state)}")
                wanted.put((range(answer.offset, stop), answer))
        finally:
            watch(None)
            wanted.put(None)  # Ends the sending thread, if nothing came.


def _written(
    ticket: Ticket, state: PackedState, part: range, answer: pb.PutStateResponse
) -> Iterator[int]:
    """Writes a part of the state to the receiver's file, as far as that goes.

    Yields:
        How far it has come: all before that byte lies in the file.
    """
    if ticket.shared_dir is None or not answer.file_name or len(part) < LEAST_BYTES:
        return
    try:
        folder, name = answer.shared_folder, answer.file_name
        file = FileWriter(ticket.shared_dir, folder, name, len(part))
    except SharedMemoryUnavailable as why:
        log.debug("the state goes as bytes: %s", why)
        return
    begin, size = part.start, LEAST_PIECE_BYTES
    try:
        while begin < part.stop:
            end = min(begin + size, part.stop)
            if not all(map(file.write, state.views(begin, end))):
                return
            yield end
            begin, size = end, FILE_PIECE_BYTES
    finally:
        file.close()


def receive_state(
    ticket: Ticket,
    arrived: PartialState,
    progress: Progress,
    watch: Watch,
    base: bytes = b"",
    options: Options = (),
) -> bytearray:
    """Receives the state that the other end sends, and verifies it.

    Args:
        ticket: of this transfer.
        arrived: what came before; it grows, and is cleared once the state is whole or wrong.
        progress: see `Progress`.
        watch: see `Watch`.
        base: the last bytes of the state that this worker could send itself.
        options: of the connection.

    Raises:
        StateCorrupt: its length or its SHA-256 is not what was announced.
        grpc.RpcError: the other end is gone, or `watch` ended the call.
    """
    file = _own_file(ticket)
    request = pb.GetStateRequest(
        run_id=ticket.run_id,
        worker=ticket.worker,
        session_token=ticket.session_token,
        transfer_id=ticket.transfer_id,
        head=conversion.key_to_proto(ticket.head),
        offset=len(arrived.data),
        sha256=arrived.sha256,
        base_sha256=hashlib.sha256(base).digest() if base else b"",
        shared_folder=b"" if file is None else file.folder,
        file_name="" if file is None else file.name,
    )
    announced: pb.GetStateResponse | None = None
    try:
        with open_channel(ticket.address, ticket.tls, options) as channel:
            call = ReducerStub(channel).GetState(request)
            # Before the first piece is awaited: the transfer may be over already.
            watch(call.cancel)
            for piece in call:
                if announced is None:
                    announced = piece
                    _continue(arrived, piece)
                    if piece.base_bytes not in (0, len(base)):
                        raise StateCorrupt(f"{piece.base_bytes} bytes of a base are left out")
                elif file is not None:
                    file.unlink()  # The sender has opened it, or never will.
                _take(piece, arrived, announced.size_bytes, file)
                progress(len(arrived.data), announced.size_bytes - announced.base_bytes)
    finally:
        watch(None)
        if file is not None:
            file.close()
    if announced is not None and announced.base_bytes:
        arrived.add(base)
    if announced is None or len(arrived.data) != announced.size_bytes:
        raise StateCorrupt(f"{len(arrived.data)} bytes of state came, and then no more")
    # Cleared in both cases: the next transfer must not go on with bytes that are wrong.
    state, is_right = arrived.data, arrived.is_right
    arrived.clear()
    if not is_right:
        raise StateCorrupt("the state's SHA-256 is not what was announced")
    return state


def _own_file(ticket: Ticket) -> StateFile | None:
    """A file that the sender may write to, if this worker shares memory."""
    try:
        return None if ticket.shared_dir is None else StateFile(ticket.shared_dir)
    except SharedMemoryUnavailable as why:
        log.debug("no file for a state: %s", why)
        return None


def _take(
    piece: pb.GetStateResponse, arrived: PartialState, size_bytes: int, file: StateFile | None
) -> None:
    """Takes what a piece brings.

    Raises:
        StateCorrupt: it is not there, or more than was announced.
    """
    if len(arrived.data) + len(piece.payload) + piece.file_bytes > size_bytes:
        arrived.clear()
        raise StateCorrupt(f"more than the {size_bytes} bytes announced came")
    if piece.file_bytes:
        if file is None:
            raise StateCorrupt("bytes of the state are in a file that this worker does not have")
        for data in file.read(piece.file_bytes):
            arrived.add(data)
    arrived.add(piece.payload)


def _continue(arrived: PartialState, first: pb.GetStateResponse) -> None:
    """Keeps what came before, if the state is the same; else starts over."""
    if first.sha256 != arrived.sha256 or first.offset != len(arrived.data):
        arrived.clear()
    arrived.sha256 = first.sha256
    if first.offset != len(arrived.data):
        raise StateCorrupt(f"the state begins at byte {first.offset}, unasked")


def persistently(
    move: Callable[[], _Result],
    so_far: Callable[[], int],
    wait: Callable[[float], object] = time.sleep,
) -> _Result:
    """Moves a state that nobody waits for, also over connections that break.

    The other end does the same, and goes on where the last call ended. `move` must end as cancelled
    once the transfer is over for the line.

    Args:
        move: one call.
        so_far: how many bytes were moved.
        wait: pauses between two calls, for so many seconds.

    Raises:
        grpc.RpcError: it was cancelled or refused, or some calls in a row moved nothing.
    """
    in_vain = 0
    while True:
        before = so_far()
        try:
            return move()
        except grpc.RpcError as error:
            in_vain = 0 if so_far() > before else in_vain + 1
            if error.code() not in _MAY_PASS or in_vain >= _MOST_IN_VAIN:
                raise
        wait(min(_FIRST_WAIT_S * 2.0**in_vain, _LONGEST_WAIT_S))


class StateCut(Protocol):
    """A state of one moment. Cut and closed by the training thread, packed by any."""

    def complete(self) -> bool:
        """Copies what is left, for which steps may wait; False: it changed before that."""

    def packed(self) -> PackedState:
        """The state, once it is complete. It is good until the cut is closed."""

    def close(self) -> None:
        """Nobody packs it any more; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class PackedCut:
    """A `StateCut` that is packed already."""

    state: PackedState

    def complete(self) -> bool:
        """See `StateCut`."""
        return True

    def packed(self) -> PackedState:
        """See `StateCut`."""
        return self.state

    def close(self) -> None:
        """See `StateCut`."""


class State(Protocol):
    """The state that is the same on all workers, as bytes; `Replica` is PyTorch's."""

    def packed(self) -> PackedState:
        """All of it, for a newcomer; good until something in the state is written."""

    def base_elements(self) -> bytes:
        """The last bytes of `packed`: weights that no worker trains; empty if none."""

    def cut_state(self) -> StateCut:
        """Cuts what `packed` is now, for a worker that learns."""

    def room_ahead(self) -> Callable[[], None] | None:
        """What gets memory for the next cut, on a thread of its own; None: there is none to get."""

    def install(self, data: bytes | bytearray) -> None:
        """Installs the bytes of what was packed, or raises and changes nothing of the state.

        Of a bytearray nothing may be left.

        Raises:
            StateCorrupt: no worker packs this, whatever its digest is.
        """


class StateMover:
    """Sends this worker's state, or installs another's. Keeps what came if it is cut off."""

    def __init__(self, link: Connection, state: State, shared_dir: Path | None = None) -> None:
        """Moves `state` over the connection `link`, or through files in the folder."""
        self._link = link
        self._shared_dir = shared_dir
        self._state = state
        self._arrived = PartialState()
        self._whole_bytes = 0
        """Of the last state that was whole."""
        self._broke = False
        """Whether a connection broke on which a state came."""

    @property
    def arrived_bytes(self) -> int:
        """How much came of the last state that was to come here."""
        return len(self._arrived.data) or self._whole_bytes

    def move(self, asked: TransferAsked) -> str:
        """Sends or receives the state; returns why that failed, or "" if it did not."""
        control, ticket = self._link.control, ticket_of(self._link, asked, self._shared_dir)
        progress = SyncProgress(control.show, sends=asked.sends)
        watch = partial(control.at_end, asked.transfer_id)
        try:
            if asked.sends:
                send_state(ticket, packed(self._state), progress, watch)
            else:
                base = self._own_base()
                self._whole_bytes = 0
                receive = partial(self._receive, ticket, progress, watch, base)
                beside = asked.beside_training
                data = persistently(receive, self._so_far) if beside else receive()
                self._whole_bytes = len(data)
                # Only now, and all of it: a state that is not whole or not right has raised (rule
                # 10).
                self._state.install(data)
        except (grpc.RpcError, StateCorrupt, TlsError) as error:
            return say_why(error, sends=asked.sends)
        return ""

    def _receive(self, ticket: Ticket, progress: Progress, watch: Watch, base: bytes) -> bytearray:
        """One call; if its connection breaks, the next one has less on its way at once."""
        options = _RECEIVES_LITTLE if self._broke else ()
        try:
            return receive_state(ticket, self._arrived, progress, watch, base, options)
        except grpc.RpcError as error:
            self._broke = self._broke or error.code() is grpc.StatusCode.UNAVAILABLE
            raise

    def _so_far(self) -> int:
        return len(self._arrived.data)

    def _own_base(self) -> bytes:
        """What this worker need not get; nothing if it can't be packed."""
        try:
            return self._state.base_elements()
        except (TypeError, ValueError):
            return b""


def ticket_of(link: Connection, asked: TransferAsked, shared_dir: Path | None) -> Ticket:
    """This worker's ticket for a transfer."""
    joined = link.joined
    return Ticket(
        address=asked.address or link.address,
        run_id=joined.run_id,
        worker=joined.worker,
        session_token=joined.session_token,
        transfer_id=asked.transfer_id,
        head=asked.head,
        tls=link.tls,
        shared_dir=shared_dir,
    )


def packed(state: State) -> PackedState:
    """A worker's state as it is now.

    If it can't be packed, the transfer fails, and this worker goes on.

    Raises:
        StateCorrupt: something in it can't be kept.
    """
    try:
        return state.packed()
    except (TypeError, ValueError) as error:
        raise StateCorrupt(f"this worker's state can't be given: {error}") from error


def say_why(error: Exception, *, sends: bool) -> str:
    """Why a transfer failed, in one line: gRPC's own text has several.

    It is logged, unless the transfer was over for the line (see `Watch`) and this worker sent: what
    it had left to send is of no use to anybody.
    """
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        if sends and error.code() is grpc.StatusCode.CANCELLED:
            return "the transfer is over"
        why = f"{error.code().name}: {error.details()}"
    log.warning(LogEvent("state_transfer_failed", f"a state transfer failed: {why}"))
    return why
