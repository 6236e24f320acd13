"""A TCP lane by hand: what it carries, and what each mistake and each attack on it comes to.

After each of them the service still serves a lane.
"""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.limits import CHUNK_ELEMENTS
from andon.v1 import layout_pb2, reducer_pb2
from hostile.lanes import DOWN, UNANNOUNCED, UP, RawLane, RawStream, chunk, next_key
from hostile.rig import MIB, SECRET, secret_flags
from integration.harness import Service
from integration.strangers import resident_bytes
from unit.andon.certificates import certify
from unit.andon.golden import by_name, golden
from vectors.crc import crc32c, with_checksums
from vectors.lanes import frame, proof, segment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

UPWARDS = [each for each in golden("tcp", "refused") if each["type"] == "andon.v1.ReduceRequest"]
NUMBERS = np.array([1.0, -2.5, 3.5], "<f4").tobytes()
UNPROVEN, PROOF_S = 64, 5.0
WINDOW = 64 * MIB
INVALID, TOO_LARGE = (
    "INVALID_ARGUMENT INVALID_MESSAGE",
    "RESOURCE_EXHAUSTED TOO_LARGE",
)


@dataclass
class Port:
    """A service without workers, which opens streams and their lanes for an insider."""

    service: Service
    idle: RawLane
    """Connected before the first test; it says nothing."""
    slow: Future[float]
    """For how many seconds one that says a byte now and then was borne."""
    workers: Iterator[int] = field(default_factory=lambda: iter(range(1000)))
    """A number for each stream, so that none is over its worker's limit."""

    def stream(self, *capabilities: str, worker: int | None = None) -> RawStream:
        """A Reduce stream with an offer."""
        worker = next(self.workers) if worker is None else worker
        token = tokens.session_token(SECRET, UNANNOUNCED, worker)
        return RawStream(self.service.address, UNANNOUNCED, worker, token, *capabilities)

    def still_serves(self) -> None:
        """A new stream's lanes carry an average."""
        with self.stream() as stream:
            up, down = stream.lanes()
            assert_echo(up, down)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    folder = tmp_path_factory.mktemp("lanes")
    with Service(folder / "run", 1, *secret_flags(folder)) as service:
        token = tokens.session_token(SECRET, UNANNOUNCED, 1023)
        with (
            RawStream(service.address, UNANNOUNCED, 1023, token) as first,
            ThreadPoolExecutor(1) as beside,
        ):
            slow = beside.submit(borne_s, first.connect(), first.preamble(UP))
            yield Port(service, first.connect(), slow)


def borne_s(lane: RawLane, preamble: bytes) -> float:
    """Says most of a preamble, slowly; returns after how long the listener hangs up."""
    began, said = time.monotonic(), 0
    while said < len(preamble) - 1 and lane.send(preamble[said : said + 1]):
        said += 1
        time.sleep(0.15)
    assert lane.ended()
    return time.monotonic() - began


def assert_echo(up: RawLane, down: RawLane, payload: bytes = NUMBERS, **fields: Any) -> None:
    """A roster of one gets its own numbers back."""
    up.send(chunk(payload, **fields))
    head, answer = down.frame()
    assert answer == payload
    assert head.averaged_block.total_weight == 1.0
    assert not head.averaged_block.HasField("payload")


def test_the_lanes_may_be_opened_in_any_order_and_the_capability_is_confirmed(port: Port) -> None:
    with port.stream() as stream:
        down = stream.lane(DOWN)
        up = stream.lane(UP)

        assert_echo(up, down)
        assert list(stream.opened.capabilities) == ["tcp.v1"]
        assert len(stream.nonce) == 32


def _reflected(stream: RawStream) -> bytes:
    """The listener's own proof, in place of the client's."""
    mac = proof("server", stream.token, stream.nonce, UP, stream.run_id, stream.worker)
    return stream.preamble(UP)[:32] + mac


def _changed(at: int, value: int) -> Callable[[RawStream], bytes]:
    def change(stream: RawStream) -> bytes:
        data = bytearray(stream.preamble(UP))
        data[at] = value
        return bytes(data)

    return change


BAD_PREAMBLES: dict[str, Callable[[RawStream], bytes]] = {
    "another worker's token": lambda s: s.preamble(
        UP, key=tokens.session_token(SECRET, s.run_id, s.worker + 1)
    ),
    "another worker": lambda s: s.preamble(UP, worker=s.worker + 1),
    "another run": lambda s: s.preamble(UP, run_id="f00d"),
    "another secret's token": lambda s: s.preamble(
        UP, key=tokens.session_token(b"x" * 32, s.run_id, s.worker)
    ),
    "no key": lambda s: s.preamble(UP, key=b"\0"),
    "a nonce of nobody": lambda s: s.preamble(UP, nonce=bytes(32)),
    "the nonce's first half alone": lambda s: s.preamble(UP, nonce=s.nonce[:16] + bytes(16)),
    "the proof of the other direction": lambda s: (
        s.preamble(DOWN)[:24] + s.preamble(UP)[24:32] + s.preamble(DOWN)[32:]
    ),
    "a direction 0": lambda s: s.preamble(0),
    "a direction 3": lambda s: s.preamble(3),
    "the listener's proof": _reflected,
    "another magic": _changed(0, 0),
    "a reserved byte": _changed(31, 1),
    "a proof with one bit changed": _changed(63, 0),
    "zeros": lambda _: bytes(64),
    "HTTP/2": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".ljust(64, b"\0"),
    "a TLS handshake": lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".ljust(64, b"\1"),
}


@pytest.mark.parametrize("name", BAD_PREAMBLES)
def test_a_wrong_preamble_is_hung_up_on_without_a_byte(port: Port, name: str) -> None:
    with port.stream() as stream:
        lane = stream.connect()
        lane.send(BAD_PREAMBLES[name](stream))

        assert lane.ended()
        assert_echo(*stream.lanes())  # the offer is still good for its worker


def test_a_proof_is_good_once(port: Port) -> None:
    with port.stream() as stream:
        up, down = stream.lanes()
        for direction in (UP, DOWN):
            again = stream.connect()
            again.send(stream.preamble(direction))
            assert again.ended()

        assert_echo(up, down)


def test_a_proof_is_good_on_no_other_stream(port: Port) -> None:
    with port.stream(worker=900) as one, port.stream(worker=900) as other:
        lane = other.connect()
        lane.send(other.preamble(UP)[:32] + one.preamble(UP)[32:])

        assert lane.ended()
        assert_echo(*other.lanes())
    with port.stream() as late:
        lane = late.connect()
        lane.send(one.preamble(UP))
        assert lane.ended()  # its stream is over, and so is its offer


def hung_up_on(stream: RawStream, data: bytes) -> bool:
    lane = stream.connect()
    lane.send(data)
    return lane.ended()


def test_each_further_connection_of_a_lane_is_taken_once_after_the_first_ones(port: Port) -> None:
    with port.stream("tcp.v1", "tcp-wide.v1") as stream, port.stream() as other:
        assert list(stream.opened.capabilities) == ["tcp.v1", "tcp-wide.v1"]
        assert (stream.opened.tcp.connections, stream.opened.tcp.adaptive) == (16, True)
        assert (other.opened.tcp.connections, other.opened.tcp.adaptive) == (0, False)
        up = stream.lane(UP)
        assert hung_up_on(stream, stream.preamble(UP, index=1))  # the lane down is not there
        down = stream.lane(DOWN)
        second = stream.lane(UP, index=15)
        stranger = stream.preamble(UP, index=2)[:32] + other.preamble(UP, index=2)[32:]
        of_another_index = bytearray(stream.preamble(UP, index=3))
        of_another_index[25] = 4
        other.lanes()

        refused = {
            "index 15 again": stream.preamble(UP, index=15),
            "index 0 again": stream.preamble(UP),
            "index 16": stream.preamble(UP, index=16),
            "another worker's token": stranger,
            "a proof of another index": bytes(of_another_index),
        }
        assert [each for each, data in refused.items() if not hung_up_on(stream, data)] == []
        assert hung_up_on(other, other.preamble(UP, index=1))  # it did not ask for wide lanes

        assert_segmented_echo(up, second, down)


def assert_segmented_echo(up: RawLane, second: RawLane, down: RawLane) -> None:
    """A frame in two segments on two connections, the later one first."""
    whole = chunk(NUMBERS)
    head_bytes, payload_bytes = struct.unpack_from("<II", whole)
    head = whole[8 : 8 + head_bytes]
    second.send(segment(0, 4, NUMBERS[4:], payload_bytes))
    up.send(segment(0, 0, NUMBERS[:4], payload_bytes, head))
    number, offset, length, head_bytes, payload_bytes = struct.unpack("<QIIII", down.read(24))
    answer = reducer_pb2.ReduceResponse.FromString(down.read(head_bytes))
    assert (number, offset, length) == (0, 0, payload_bytes)
    assert answer.averaged_block.total_weight == 1.0
    assert down.read(length) == NUMBERS


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (segment(0, 8, b"four", 8), INVALID),
        (segment(0, 0, b"", 2**32 - 1, b"head"), TOO_LARGE),
        (segment(0, 0, b"", 0, b"no message"), INVALID),
    ],
    ids=["beyond its payload", "a payload above the limit", "no message"],
)
def test_a_segment_that_breaks_a_rule_ends_the_stream_and_says_why(
    port: Port, broken: bytes, reason: str
) -> None:
    with port.stream("tcp.v1", "tcp-wide.v1") as stream:
        up, down = stream.lanes()
        second = stream.lane(UP, index=1)

        second.send(broken)

        assert reason in str(stream.end())
        assert all(each.ended() for each in (up, down, second))


def test_connections_without_a_proof_push_out_the_oldest_of_their_kind(port: Port) -> None:
    with port.stream() as working, port.stream() as stream, ExitStack() as held:
        up, down = working.lanes()
        silent = [stream.connect() for _ in range(2 * UNPROVEN)]
        for each in silent:
            held.callback(each.close)

        began = time.monotonic()
        assert all(each.ended() for each in silent[: UNPROVEN // 2])
        assert time.monotonic() - began < PROOF_S
        assert_echo(up, down)
        assert_echo(*stream.lanes())


@pytest.mark.parametrize("vector", UPWARDS, ids=by_name)
def test_a_frame_that_breaks_a_rule_ends_the_stream_and_says_why(
    port: Port, vector: dict[str, Any]
) -> None:
    with port.stream() as stream:
        up, down = stream.lanes()
        up.send(bytes.fromhex(vector["frame"]))

        end = stream.end()

        assert str(end) == (TOO_LARGE if "above the limit" in vector["name"] else INVALID), end
        assert end.message
        assert down.ended()
    port.still_serves()


@pytest.mark.parametrize("half_close", [False, True], ids=["closed", "half-closed"])
def test_a_lane_that_ends_at_any_byte_of_a_frame_ends_its_stream(
    port: Port, half_close: bool
) -> None:
    size = len(chunk(NUMBERS, world_size=2))
    for at in (0, 1, 4, 7, 8, 9, size - 13, size - 12, size - 1, size):
        with port.stream() as stream:
            up, down = stream.lanes()
            assert_echo(up, down)
            whole = chunk(NUMBERS, world_size=2).ljust(size, b"\0")
            up.send(whole[:at])
            if half_close:
                up.socket.shutdown(1)
            else:
                up.close()

            stream.end()
            assert down.ended(), at
    port.still_serves()


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_the_end_of_the_call_ends_its_lanes(port: Port, direction: int) -> None:
    with port.stream() as stream:
        lanes = stream.lanes()
        assert_echo(*lanes)
        lanes[0].send(chunk(NUMBERS)[:-5])  # it ends while a payload is half read
        stream.close()

        assert lanes[direction - 1].ended()
    port.still_serves()


def test_what_a_worker_says_on_its_lane_down_is_never_read(port: Port) -> None:
    pid = port.service.process.pid
    with port.stream() as stream:
        up, down = stream.lanes()
        assert_echo(up, down)
        before = resident_bytes(pid)
        down.socket.settimeout(0.2)
        while down.send(bytes(MIB)):
            pass

        down.socket.settimeout(20.0)
        assert_echo(up, down)
        assert resident_bytes(pid) - before < 16 * MIB


def test_a_lane_down_that_is_closed_ends_its_stream_when_something_is_sent(port: Port) -> None:
    with port.stream() as stream:
        up, down = stream.lanes()
        assert_echo(up, down)
        down.close()
        while up.send(chunk(NUMBERS)):
            time.sleep(0.01)

        assert stream.end().code != grpc.StatusCode.OK
    port.still_serves()


def _gradient() -> reducer_pb2.BlockGradient:
    """A right contribution of a worker alone."""
    return reducer_pb2.BlockGradient(
        key=next_key(),
        operation=reducer_pb2.OPERATION_WEIGHTED_MEAN,
        world_size=1,
        element_count=3,
        weight=1.0,
        encoding=layout_pb2.ENCODING_FLOAT32,
        payload=NUMBERS,
    )


def _checked(change: Callable[[Any], None]) -> bytes:
    whole: Any = with_checksums(reducer_pb2.ReduceRequest(block_gradient=_gradient()))
    change(whole)
    payload = bytes(whole.block_gradient.payload)
    whole.block_gradient.ClearField("payload")
    return frame(whole.SerializeToString(), payload)


def _flip(whole: Any) -> None:
    data = bytearray(whole.block_gradient.payload)
    data[5] ^= 4
    whole.block_gradient.payload = bytes(data)


def test_checksums_are_made_demanded_and_checked_as_on_grpc(port: Port) -> None:
    with port.stream("tcp.v1", "crc32c.v1") as stream:
        up, down = stream.lanes()
        up.send(_checked(lambda _: None))
        head, payload = down.frame()
        head.averaged_block.payload = payload
        assert head == with_checksums(head)
        up.send(_checked(_flip))
        assert down.frame()[0].WhichOneof("message") in {"round_aborted", "block_fault"}
    with port.stream("tcp.v1", "crc32c.v1") as stream:
        up, down = stream.lanes()
        up.send(_checked(lambda whole: whole.ClearField("crc32c")))
        assert str(stream.end()) == INVALID
    with port.stream("tcp.v1", "crc32c.v1") as stream:
        up, down = stream.lanes()
        up.send(_checked(lambda whole: setattr(whole.block_gradient, "block", 1)))
        assert str(stream.end()) == INVALID
    assert crc32c(b"123456789") == 0xE3069283


def test_a_worker_that_does_not_read_its_lane_is_held_to_the_window(port: Port) -> None:
    pid = port.service.process.pid
    payload = np.ones(CHUNK_ELEMENTS, "<f4").tobytes()
    with port.stream() as stream:
        up, down = stream.lanes()
        before = resident_bytes(pid)
        up.socket.settimeout(1.0)
        sent, key = 0, next_key()
        while sent < 200 and up.send(chunk(payload, key=key, element_offset=sent * CHUNK_ELEMENTS)):
            sent += 1

        grown = resident_bytes(pid, most=True) - before

        assert sent < 200, "the reducer read on though nobody read its answers"
        assert grown < 3 * WINDOW
        answers = [down.frame() for _ in range(sent - 1)]
        assert all(answer == payload for _, answer in answers)
        places = {head.averaged_block.element_offset // CHUNK_ELEMENTS for head, _ in answers}
        assert places <= set(range(sent))
        assert len(places) == sent - 1
    port.still_serves()


def test_stale_messages_without_end_take_no_memory(port: Port) -> None:
    pid = port.service.process.pid
    with port.stream() as stream:
        up, down = stream.lanes()
        stale = frame(
            reducer_pb2.ReduceRequest(
                abstain=reducer_pb2.Abstain(key=next_key(), world_size=1)
            ).SerializeToString()
        )
        assert_echo(up, down)
        before = resident_bytes(pid)
        up.socket.settimeout(1.0)
        for _ in range(50):
            if not up.send(1000 * stale):
                break

        assert resident_bytes(pid) - before < 32 * MIB
    port.still_serves()


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    folder = tmp_path_factory.mktemp("encrypted")
    host = certify(folder / "ca", folder / "host", "127.0.0.1")
    certify(folder / "other-ca", folder / "other", "127.0.0.1")
    flags = (*secret_flags(folder), "--tls", str(host))
    with Service(folder / "run", 1, *flags) as service:
        yield service, folder


def _context(folder: Path, trusted: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str((trusted or folder) / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def _secure(service: Service, host: Path) -> RawStream:
    parts = [(host / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
    token = tokens.session_token(SECRET, UNANNOUNCED, 5)
    credentials = grpc.ssl_channel_credentials(*parts)
    return RawStream(service.address, UNANNOUNCED, 5, token, credentials=credentials)


def test_an_encrypted_line_has_encrypted_lanes_for_its_own_certificates_alone(
    encrypted: tuple[Service, Path],
) -> None:
    service, folder = encrypted
    host = folder / "host"
    with _secure(service, host) as stream:
        clear = stream.connect()
        clear.send(stream.preamble(UP))
        assert clear.read(32) != proof(
            "server", stream.token, stream.nonce, UP, stream.run_id, stream.worker
        )

        strange = _context(folder / "other", trusted=host)
        with pytest.raises((ssl.SSLError, OSError, AssertionError)):
            stream.lane(UP, strange)
        nameless = ssl.create_default_context(cafile=str(host / "ca.crt"))
        with pytest.raises((ssl.SSLError, OSError, AssertionError)):
            stream.lane(UP, nameless)
        old = _context(host)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            stream.lane(UP, old)

        up, down = stream.lanes(_context(host))
        assert isinstance(up.socket, ssl.SSLSocket)
        assert up.socket.version() == "TLSv1.3"
        assert_echo(up, down)


def test_two_gigabytes_that_are_only_said_take_no_memory(port: Port) -> None:
    pid = port.service.process.pid
    before = resident_bytes(pid)
    for lengths in ((2**32 - 1, 0), (60, 2**32 - 1), (2**32 - 1, 2**32 - 1), (65_537, 12)):
        with port.stream() as stream:
            up, _ = stream.lanes()
            up.send(struct.pack("<II", *lengths) + bytes(100))
            assert str(stream.end()) in {TOO_LARGE, INVALID}
    assert resident_bytes(pid) - before < 32 * MIB


def test_connections_that_say_nothing_or_little_are_closed_in_time(port: Port) -> None:
    assert port.idle.ended()
    assert port.slow.result(2 * PROOF_S) < 2 * PROOF_S
