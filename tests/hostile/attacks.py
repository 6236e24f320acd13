"""The attacks: each takes a target and a scale, and returns what the attacker saw.

The attackers have no access: they can only reach the port. Those named *insider* also have a
session token, for a worker that is not on the line.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from andon.protocol import tokens
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.messages import OpenRound
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2, reducer_pb2
from andon.wire.frames import frame_request
from hostile.http2 import DATA, HALF_CLOSE, PREFACE, Connection, frame, grpc_message
from hostile.lanes import DOWN, UNANNOUNCED, UP, RawStream, chunk
from hostile.layouts import hostile_layouts, length_delimited
from hostile.rig import SECRET, Target
from integration.strangers import REDUCE, TRAIN, end_of, talk
from vectors.lanes import REFUSED

__all__ = ["ATTACKS", "Attack", "Scale"]

REGISTER, PUT = "/andon.v1.Coordinator/RegisterReducer", "/andon.v1.Reducer/PutState"
GET, STATUS = "/andon.v1.Reducer/GetState", "/andon.v1.Coordinator/GetStatus"
WATCH = "/andon.v1.Coordinator/WatchStatus"
HEALTH = "/grpc.health.v1.Health/Watch"
INSIDER = 7
"""A worker with a valid token that is not on the line."""
_PATIENCE_S = 20.0
"""How long a busy service may take to hang up."""
_PREAMBLE_BYTES = 64


@dataclass(frozen=True)
class Scale:
    """The intensity of an attack."""

    seconds: float = 1.0
    connections: int = 200


Attack = Callable[[Target, Scale], dict[str, Any]]


def silent_connections(target: Target, scale: Scale) -> dict[str, Any]:
    """Connections that never send a byte."""
    return _held(target, scale, b"")


def preface_then_nothing(target: Target, scale: Scale) -> dict[str, Any]:
    """Connections that send the HTTP/2 preface, and then nothing."""
    return _held(target, scale, PREFACE)


def garbage(target: Target, scale: Scale) -> dict[str, Any]:
    """Connections that send a kilobyte of noise."""
    noise = random.Random(1).randbytes(1024)
    return _held(target, scale, noise, patience_s=_PATIENCE_S)


def many_streams(target: Target, scale: Scale) -> dict[str, Any]:
    """Calls of every kind, a few hundred on each connection, that never send a first message."""
    methods = (TRAIN, REDUCE, PUT, GET, STATUS, WATCH, REGISTER, HEALTH)
    connections = [Connection(target.address) for _ in range(max(2, scale.connections // 50))]
    opened = 0
    until = time.monotonic() + scale.seconds
    while time.monotonic() < until:
        for connection in connections:
            connection.open(methods[opened % len(methods)])
            connection.answer()
            opened += 1
        connections = [_alive(each, target) for each in connections]
    for each in connections:
        each.close()
    return {"calls": opened}


def rapid_reset(target: Target, scale: Scale) -> dict[str, Any]:
    """Calls that are cancelled as soon as they are opened."""
    connection, resets, connections = Connection(target.address), 0, 1
    until = time.monotonic() + scale.seconds
    while time.monotonic() < until:
        for _ in range(100):
            connection.reset(connection.open(STATUS))
        resets += 100
        connection.answer()
        if connection.closed:
            connection, connections = Connection(target.address), connections + 1
    connection.close()
    return {"resets": resets, "connections": connections}


def declared_lengths(target: Target, scale: Scale) -> dict[str, Any]:
    """Messages and frames whose headers declare a length of four gigabytes, or 16 MiB."""
    said = 0
    until = time.monotonic() + scale.seconds
    while time.monotonic() < until:
        for method in (TRAIN, REDUCE, PUT, STATUS):
            connection = Connection(target.address)
            connection.say(connection.open(method), grpc_message(bytes(1000), 2**32 - 1))
            stream = connection.open(method)
            connection.send(frame(DATA, 0, stream, bytes(100), length=2**24 - 1))
            connection.answer()
            connection.close()
            said += 2
    return {"messages": said}


def half_messages(target: Target, scale: Scale) -> dict[str, Any]:
    """First messages of 4 MiB without their last bytes, on hundreds of calls."""
    body = grpc_message(bytes(MAX_MESSAGE_BYTES - 1000), MAX_MESSAGE_BYTES - 500)
    count = max(2, scale.connections // 50)
    connections = [Connection(target.address) for _ in range(count)]
    calls = [
        (connection, connection.open(method))
        for connection in connections
        for method in (STATUS, TRAIN, REDUCE, PUT) * 10
    ]
    sent, until = Counter[int](), time.monotonic() + scale.seconds
    while time.monotonic() < until:
        for number, (connection, stream) in enumerate(calls):
            connection.answer()
            at = sent[number]
            sent[number] += connection.feed(stream, body[at : at + 2**16])
    for each in connections:
        each.close()
    return {"calls": len(calls), "bytes": sent.total()}


def slow_writers(target: Target, scale: Scale) -> dict[str, Any]:
    """Valid first messages, sent at a few bytes a second."""
    join = grpc_message(target.stranger.join().SerializeToString())
    connections = [Connection(target.address) for _ in range(max(2, scale.connections // 10))]
    calls = [(each, each.open(TRAIN)) for each in connections]
    ticks = max(2, round(2 * scale.seconds))
    for tick in range(ticks):
        for connection, stream in calls:
            connection.say(stream, join[tick : tick + 1])
            connection.answer()
        time.sleep(0.5)
    for each in connections:
        each.close()
    return {"calls": len(calls), "bytes_each": ticks}


def watchers_that_never_read(target: Target, scale: Scale) -> dict[str, Any]:
    """Calls that watch the line and the health, and never read the answers."""
    connections = [Connection(target.address) for _ in range(max(2, scale.connections // 20))]
    for connection in connections:
        for method in (WATCH, HEALTH) * 10:
            stream = connection.open(method)
            connection.send(frame(DATA, HALF_CLOSE, stream, grpc_message(b"")))
    time.sleep(scale.seconds)
    for each in connections:
        each.close()
    return {"calls": 20 * len(connections)}


def flood_of_joins(target: Target, scale: Scale) -> dict[str, Any]:
    """Well-formed Joins that are refused: another run, no free slot, a slot that is taken."""
    stranger = target.stranger
    joins = [
        stranger.join(run_id="f00d").SerializeToString(),
        stranger.join(launch_slot=1).SerializeToString(),
        stranger.join(protocol_version=9).SerializeToString(),
    ]

    def message(number: int) -> bytes:
        if number % 4 == 3:
            return stranger.join(incarnation=10_000 + number).SerializeToString()
        return joins[number % 4]

    return _flood(target, scale, TRAIN, message)


def flood_of_offers(target: Target, scale: Scale) -> dict[str, Any]:
    """Registrations of reducers without a proof."""
    offer = pb.RegisterReducerRequest(
        offer=pb.ReducerOffer(run_id="", protocol_version=1, address="127.0.0.1:9")
    ).SerializeToString()
    forged = pb.RegisterReducerRequest(proof=pb.ReducerProof(mac=bytes(32))).SerializeToString()
    return _flood(target, scale, REGISTER, lambda _: offer, forged)


def flood_of_questions(target: Target, scale: Scale) -> dict[str, Any]:
    """GetStatus calls without a pause."""
    return _flood(target, scale, STATUS, lambda _: b"")


def layouts_of_millions(target: Target, scale: Scale) -> dict[str, Any]:
    """Joins whose layout fills a message: with empty blocks, components, one shape, names, or as
    much as is allowed."""
    stranger, ends = target.stranger, Counter[str]()
    plain = pb.Join.FromString(stranger.join().join.SerializeToString())
    plain.ClearField("layout")
    # Protobuf merges two parts of one message.
    joins = [
        length_delimited(1, plain.SerializeToString() + length_delimited(9, each))
        for each in hostile_layouts()
    ]
    until = time.monotonic() + scale.seconds
    rounds = 0
    while time.monotonic() < until or not rounds:
        for join in joins:
            ends[str(stranger.refused(TRAIN, join))] += 1
        rounds += 1
    return {"ends": dict(ends)}


def forged_tokens(target: Target, scale: Scale) -> dict[str, Any]:
    """Session tokens of another worker, another run or another secret, truncated, and missing."""
    run, ends = target.line.service.run_id, Counter[str]()
    mine = tokens.session_token(SECRET, run, INSIDER)
    forged = {
        "another worker's": (run, 0, mine),
        "another run's": (run, INSIDER, tokens.session_token(SECRET, "f00d", INSIDER)),
        "another secret's": (run, INSIDER, tokens.session_token(b"x" * 32, run, INSIDER)),
        "cut short": (run, INSIDER, mine[:31]),
        "none": (run, INSIDER, b""),
    }
    until = time.monotonic() + scale.seconds
    tries = 0
    while time.monotonic() < until or not tries:
        for run_id, worker, token in forged.values():
            opening = frame_request(OpenRound(run_id, worker, token))
            put = _put(run_id, worker, token)
            ends[str(target.stranger.refused(REDUCE, opening))] += 1
            ends[str(target.stranger.refused(PUT, put))] += 1
        tries += 1
    return {"ends": dict(ends)}


def insider_opens_streams(target: Target, scale: Scale) -> dict[str, Any]:
    """Far more streams from one worker than it could use."""
    run = target.line.service.run_id
    opening = frame_request(OpenRound(run, INSIDER, tokens.session_token(SECRET, run, INSIDER)))
    connections = [Connection(target.address) for _ in range(max(2, scale.connections // 50))]
    for connection in connections:
        for _ in range(20):
            connection.say(connection.open(REDUCE), grpc_message(opening))
            connection.answer()
    until = time.monotonic() + scale.seconds
    while time.monotonic() < until:
        for connection in connections:
            connection.answer()  # the service closes connections that answer no ping
        time.sleep(0.1)
    refused = target.stranger.refused(REDUCE, opening)
    for each in connections:
        each.close()
    return {"streams": 20 * len(connections), "the next": str(refused)}


def insider_sends_state_for_ever(target: Target, scale: Scale) -> dict[str, Any]:
    """An endless state, sent to a receiver that never reads it."""
    # Of a run that no coordinator announces: of the line's, the coordinator names both ends.
    run = UNANNOUNCED
    token = tokens.session_token(SECRET, run, INSIDER)
    receiver, sender = Connection(target.address), Connection(target.address)
    wanted = reducer_pb2.GetStateRequest(
        run_id=run,
        worker=INSIDER,
        session_token=token,
        transfer_id=99,
        head=record_pb2.Key(term=1, round=1),
    )
    reading = receiver.open(GET)
    receiver.send(frame(DATA, HALF_CLOSE, reading, grpc_message(wanted.SerializeToString())))
    sending = sender.open(PUT)
    sender.say(sending, grpc_message(_put(run, INSIDER, token)))
    piece = grpc_message(reducer_pb2.PutStateRequest(payload=bytes(2**20)).SerializeToString())
    sent, left, until = 0, piece, time.monotonic() + scale.seconds
    while time.monotonic() < until:
        sender.answer()
        taken = sender.feed(sending, left)
        sent, left = sent + taken, left[taken:] or piece
        if not taken:
            time.sleep(0.01)
    sender.close()
    receiver.close()
    return {"bytes": sent}


def unspeakable(target: Target, scale: Scale) -> dict[str, Any]:
    """Bytes that are not HTTP/2, on one connection after another."""
    said = 0
    until = time.monotonic() + scale.seconds
    while time.monotonic() < until:
        talk(target.address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        talk(target.address, PREFACE + b"\xff" * 4096)
        said += 2
    return {"connections": said}


def _put(run_id: str, worker: int, token: bytes) -> bytes:
    """The first piece of a state that declares one exbibyte."""
    return reducer_pb2.PutStateRequest(
        run_id=run_id,
        worker=worker,
        session_token=token,
        transfer_id=99,
        head=record_pb2.Key(term=1, round=1),
        size_bytes=2**60,
        sha256=bytes(32),
    ).SerializeToString()


def lanes_without_a_proof(target: Target, scale: Scale) -> dict[str, Any]:
    """Connections to the port of lanes: silent, noisy, with proofs of others, and used ones."""
    noise = random.Random(2).randbytes(4096)
    admitted = opened = 0
    until = time.monotonic() + scale.seconds
    with _insider(target) as stream, ExitStack() as held:
        stream.lane(UP)
        says = (
            b"",
            noise,
            stream.preamble(UP),
            stream.preamble(DOWN, key=bytes(48)),
            stream.preamble(DOWN, worker=0),
            stream.preamble(DOWN)[:63],
        )
        while time.monotonic() < until or opened < len(says):
            lane = stream.connect()
            held.callback(lane.close)
            said = says[opened % len(says)]
            lane.send(said)
            opened += 1
            if len(said) >= _PREAMBLE_BYTES:  # The listener answers it, or hangs up.
                admitted += len(lane.read(32)) == 32
            if opened % max(2, scale.connections) == 0:
                held.close()
    return {"connections": opened, "admitted": admitted}


def insider_breaks_frames(target: Target, scale: Scale) -> dict[str, Any]:
    """Frames that break a rule, that are cut anywhere, and whose lengths are lies."""
    ends, until, tries = Counter[str](), time.monotonic() + scale.seconds, 0
    bad = [bytes.fromhex(each["frame"]) for each in REFUSED]
    whole = chunk(bytes(4096), key={"term": 1, "round": 1})
    chance = random.Random(3)
    while time.monotonic() < until or tries < len(bad):
        with _insider(target) as stream:
            up, _ = stream.lanes()
            if tries % 2:
                up.send(bad[tries // 2 % len(bad)])
                ends[str(stream.end()).partition(" ")[0]] += 1
            else:
                up.send(whole[: chance.randrange(len(whole))])
        tries += 1
    return {"streams": tries, "ends": dict(ends)}


def insider_reads_no_answers(target: Target, scale: Scale) -> dict[str, Any]:
    """Chunks of a round that is over, as fast as they are taken, whose answers nobody reads."""
    stale = 200 * chunk(bytes(64), key={"term": 1, "round": 1})
    sent = 0
    with _insider(target) as stream:
        up, _ = stream.lanes()
        up.socket.settimeout(max(0.2, scale.seconds / 5))
        until = time.monotonic() + scale.seconds
        while time.monotonic() < until and up.send(stale):
            sent += len(stale)
        time.sleep(max(0.0, until - time.monotonic()))
    return {"bytes": sent}


def _insider(target: Target) -> RawStream:
    """A stream of the insider."""
    run = target.line.service.run_id
    token = tokens.session_token(SECRET, run, INSIDER)
    return RawStream(target.address, run, INSIDER, token)


def _flood(
    target: Target, scale: Scale, method: str, message: Callable[[int], bytes], *more: bytes
) -> dict[str, Any]:
    """As many calls as possible on four channels, for the given time; returns their results."""
    ends, until, number = Counter[str](), time.monotonic() + scale.seconds, 0
    channels = [
        grpc.insecure_channel(target.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    try:
        while time.monotonic() < until:
            calls = []
            for channel in channels:
                for _ in range(8):
                    call: Any = channel.stream_stream(method)
                    calls.append(call(iter([message(number), *more]), timeout=20))
                    number += 1
            for each in calls:
                ends[str(end_of(each))] += 1
    finally:
        for channel in channels:
            channel.close()
    return {"calls": number, "ends": dict(ends)}


def _held(target: Target, scale: Scale, data: bytes, *, patience_s: float = 0.0) -> dict[str, Any]:
    """Connections that send `data` and then wait; returns how many the service closed meanwhile.

    With `patience_s` it is given so much longer to close them all.
    """
    connections, refused = [], 0
    for _ in range(scale.connections):
        try:
            connection = Connection(target.address, polite=False)
        except OSError:
            refused += 1
            continue
        connection.send(data)
        connections.append(connection)
    time.sleep(scale.seconds)
    until = time.monotonic() + patience_s
    ended = sum(each.await_end(until - time.monotonic()) for each in connections)
    for each in connections:
        each.close()
    return {"connections": len(connections), "hung up on": ended, "not let in": refused}


def _alive(connection: Connection, target: Target) -> Connection:
    return connection if not connection.closed else Connection(target.address)


ATTACKS: dict[str, Attack] = {
    each.__name__: each
    for each in (
        *(silent_connections, preface_then_nothing, garbage, unspeakable, many_streams),
        *(rapid_reset, declared_lengths, half_messages, slow_writers, watchers_that_never_read),
        *(flood_of_joins, flood_of_offers, flood_of_questions, layouts_of_millions),
        *(forged_tokens, insider_opens_streams, insider_sends_state_for_ever),
        *(lanes_without_a_proof, insider_breaks_frames, insider_reads_no_answers),
    )
}
"""By name."""
