"""TCP lanes: what opens them, what travels on them, and what ends them (section 17)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.runner.checks import ServerCheck, check, require, same
from andon_conformance.runner.gradients import (
    AssignedRound,
    chunk_message,
    exchange,
    expect_averages,
    rough_parts,
)
from andon_conformance.runner.lane_talk import (
    CAPABILITY,
    DOWN,
    UP,
    LaneTalk,
    Offer,
    framed,
)
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player

__all__ = ["CHECKS"]

_MAX_HEAD = 2**16


async def _take_to_lanes(players: Sequence[Player]) -> list[LaneTalk]:
    """Opens the lanes of players, which use them from then on."""
    talks = []
    for player in players:
        talk = await (await Offer.of(player)).lanes()
        player.bulk = talk
        talks.append(talk)
    return talks


@check(
    "lane.offer",
    "17",
    "A worker that names tcp.v1 is offered a port and 32 random bytes, other ones each time",
)
async def offers_are_anew(line: LineUnderTest) -> None:
    player = line.players[0]
    first, second = await Offer.of(player), await Offer.of(player)
    require(
        first.opened.tcp.nonce != second.opened.tcp.nonce,
        "another nonce for each stream",
        "the same",
    )
    plain = await player.open_bulk(capabilities=("crc32c.v1",))
    opened = await plain.take("round_opened")
    require(
        CAPABILITY not in opened.capabilities and not opened.HasField("tcp"),
        "no offer to a worker that did not ask",
        opened.tcp,
    )


@check(
    "lane.average",
    "17",
    "Averages that travel on lanes are those of the protocol, bit for bit, at every rank",
)
async def lanes_carry_averages(line: LineUnderTest) -> None:
    round_ = await line.deal()
    await _take_to_lanes(round_.players)
    parts = rough_parts(round_)
    expect_averages(round_, parts, await exchange(round_, parts))


@check(
    "lane.mixed",
    "17",
    "Ranks on lanes and ranks on gRPC take part in the same average",
    workers=2,
)
async def lanes_and_grpc_mix(line: LineUnderTest) -> None:
    round_ = await line.deal()
    await _take_to_lanes(round_.players[:1])
    parts = rough_parts(round_)
    expect_averages(round_, parts, await exchange(round_, parts))


@check(
    "lane.proof",
    "17",
    "A connection with a wrong proof is closed without a byte, and the offer stays good",
)
async def proofs_are_checked(line: LineUnderTest) -> None:
    player = line.players[0]
    offer, other = await Offer.of(player), await Offer.of(player)
    *most, last = player.accepted.session_token
    wrong = {
        "with another token": offer.preamble(UP, key=bytes([*most, last ^ 1])),
        "of another worker": offer.preamble(UP, worker=player.worker + 1),
        "of another run": offer.preamble(UP, run_id="another"),
        "of the other direction": offer.preamble(UP, proven=DOWN),
        "of another stream": offer.preamble(UP)[:32] + other.preamble(UP)[32:],
        "of a nonce that nobody offered": offer.preamble(UP, nonce=bytes(32)),
        "of a direction that there is not": offer.preamble(3),
        "of zeros": bytes(64),
    }
    for which, preamble in wrong.items():
        answer = await offer.said_to(preamble)
        require(not answer, f"the end of a connection with a proof {which}", answer.hex())
    await offer.lanes()


@check("lane.once", "17", "A proof opens one connection, and not another one")
async def proofs_are_good_once(line: LineUnderTest) -> None:
    player = line.players[0]
    offer = await Offer.of(player)
    used = offer.preamble(UP)
    await offer.lane(UP)
    answer = await offer.said_to(used)
    require(not answer, "the end of a second connection with one proof", answer.hex())


@check(
    "lane.fallback",
    "17",
    "A stream whose lanes are not both opened goes on over gRPC",
)
async def grpc_stays(line: LineUnderTest) -> None:
    round_ = await line.deal()
    for player in round_.players:
        offer = await Offer.of(player)
        _, half = await offer.lane(UP)
        half.close()
        player.bulk = offer.talk
    parts = rough_parts(round_)
    expect_averages(round_, parts, await exchange(round_, parts))


@check(
    "lane.frame",
    "17",
    "A frame that breaks a rule ends the stream, with a status that says so",
)
async def frames_are_checked(line: LineUnderTest) -> None:
    round_ = await line.deal()
    player = round_.players[0]
    whole = _gradient(round_, player)
    good = framed(whole)
    head_bytes, _ = struct.unpack("<II", good[:8])
    head, payload = good[8 : 8 + head_bytes], good[8 + head_bytes :]
    invalid = {
        "without a head": struct.pack("<II", 0, 0),
        "with a payload that is too short": _frame(head, payload[:-1]),
        "without its payload": _frame(head, b""),
        "with a payload in its head": _frame(whole.SerializeToString(), payload),
        "with a payload beside an abstention": _frame(_abstention(round_, player), payload),
        "with an OpenRound": _frame(
            reducer_pb2.ReduceRequest(
                open_round=reducer_pb2.OpenRound(run_id="x")
            ).SerializeToString(),
            b"",
        ),
        "of an unknown case": _frame(b"\xca\x3e\x00", b""),
        "with a head that is cut short": _frame(head[:-1], payload),
    }
    too_large = {
        "with a head above 64 KiB": struct.pack("<II", _MAX_HEAD + 1, 0),
        "with a payload of 4 GiB": struct.pack("<II", head_bytes, 2**32 - 1) + head,
    }
    for code, frames in (("INVALID_ARGUMENT", invalid), ("RESOURCE_EXHAUSTED", too_large)):
        for which, data in frames.items():
            (talk,) = await _take_to_lanes([player])
            await talk.send(data)
            same(f"after a frame {which} the status", code, (await talk.end()).code.name)


@check(
    "lane.grpc",
    "17",
    "A message over gRPC beside open lanes ends the stream with INVALID_ARGUMENT",
)
async def messages_keep_to_the_lanes(line: LineUnderTest) -> None:
    round_ = await line.deal()
    player = round_.players[0]
    (talk,) = await _take_to_lanes([player])
    await _use(round_, player, talk)
    await talk.call.send(_gradient(round_, player))
    same("the status", "INVALID_ARGUMENT", (await talk.end()).code.name)


@check(
    "lane.end",
    "17",
    "The end of the lane up ends the call and the lane down; the end of the call ends both lanes",
)
async def lanes_end_together(line: LineUnderTest) -> None:
    round_ = await line.deal()
    player = round_.players[0]
    (talk,) = await _take_to_lanes([player])
    await _use(round_, player, talk)
    talk.close_lane(UP)
    await talk.end()
    (talk,) = await _take_to_lanes([player])
    await _use(round_, player, talk)
    await talk.call.cancel()
    await talk.end()


@check(
    "lane.voids",
    "2.5",
    "A lane that breaks in a round voids it: the others get RoundAborted",
    workers=2,
)
async def a_lost_lane_voids_the_round(line: LineUnderTest) -> None:
    round_ = await line.deal()
    lost, other = round_.players[:2]
    talks = await _take_to_lanes([lost, other])
    parts = rough_parts(round_)
    # Another chunk each, so that none is averaged.
    for player, talk, chunk in zip((lost, other), talks, round_.chunks, strict=False):
        await talk.send(chunk_message(round_, player, parts[player], chunk))
    talks[0].close_lane(UP)
    aborted = await talks[1].take("round_aborted")
    same("the key", conversion.key_to_proto(round_.key), aborted.key)


async def _use(round_: AssignedRound, player: Player, talk: LaneTalk) -> None:
    """Puts a stream on its lanes: a first frame, and one whose answer shows that both were read."""
    await talk.send(_gradient(round_, player))
    oldest = conversion.key_to_proto(Key(1, 1))
    abstain = reducer_pb2.Abstain(key=oldest, rank=0, world_size=len(round_.works))
    await talk.send(reducer_pb2.ReduceRequest(abstain=abstain))
    await talk.take("stale_round")


def _frame(head: bytes, payload: bytes) -> bytes:
    return struct.pack("<II", len(head), len(payload)) + head + payload


def _gradient(round_: AssignedRound, player: Player) -> reducer_pb2.ReduceRequest:
    return chunk_message(round_, player, rough_parts(round_)[player], round_.chunks[0])


def _abstention(round_: AssignedRound, player: Player) -> bytes:
    return reducer_pb2.ReduceRequest(
        abstain=reducer_pb2.Abstain(
            key=conversion.key_to_proto(round_.key),
            rank=round_.works[player].rank,
            world_size=len(round_.works),
        )
    ).SerializeToString()


CHECKS: tuple[ServerCheck, ...] = (
    offers_are_anew,
    lanes_carry_averages,
    lanes_and_grpc_mix,
    proofs_are_checked,
    proofs_are_good_once,
    grpc_stays,
    frames_are_checked,
    messages_keep_to_the_lanes,
    lanes_end_together,
    a_lost_lane_voids_the_round,
)
