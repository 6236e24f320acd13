"""TCP lanes: what opens them, what travels on them, and what ends them (section 17)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.lane_format import CAPABILITY, DOWN, UP, frame
from andon_conformance.runner.checks import Checks, require, same
from andon_conformance.runner.gradients import AssignedRound
from andon_conformance.runner.lane_talk import LaneTalk, Offer, split
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player

__all__ = ["CHECKS"]

CHECKS = Checks()

_MAX_HEAD = 2**16


async def _take_to_lanes(players: Sequence[Player]) -> list[LaneTalk]:
    """Opens the lanes of players, which use them from then on."""
    talks = []
    for player in players:
        talk = await (await Offer.of(player)).lanes()
        player.bulk = talk
        talks.append(talk)
    return talks


async def _expect_averages(round_: AssignedRound) -> None:
    """Demands right averages, whichever way each rank's messages take."""
    parts = round_.rough_parts()
    round_.expect_averages(parts, await round_.exchange(parts))


@CHECKS.add("lane.offer", "17")
async def offers_are_anew(line: LineUnderTest) -> None:
    """A worker that names tcp.v1 is offered a port and 32 random bytes, other ones each time."""
    player = line.players[0]
    first, second = await Offer.of(player), await Offer.of(player)
    another = first.opened.tcp.nonce != second.opened.tcp.nonce
    require(another, "another nonce for each stream", "the same")
    plain = await player.open_bulk(capabilities=("crc32c.v1",))
    opened = await plain.take("round_opened")
    none = CAPABILITY not in opened.capabilities and not opened.HasField("tcp")
    require(none, "no offer to a worker that did not ask", opened.tcp)


@CHECKS.add("lane.average", "17")
async def lanes_carry_averages(line: LineUnderTest) -> None:
    """Averages that travel on lanes are those of the protocol, bit for bit, at every rank."""
    round_ = await line.deal()
    await _take_to_lanes(round_.players)
    await _expect_averages(round_)


@CHECKS.add("lane.mixed", "17", workers=2)
async def lanes_and_grpc_mix(line: LineUnderTest) -> None:
    """Ranks on lanes and ranks on gRPC take part in the same average."""
    round_ = await line.deal()
    await _take_to_lanes(round_.players[:1])
    await _expect_averages(round_)


@CHECKS.add("lane.proof", "17")
async def proofs_are_checked(line: LineUnderTest) -> None:
    """A connection with a wrong proof is closed without a byte, and the offer stays good."""
    player = line.players[0]
    offer, other = await Offer.of(player), await Offer.of(player)
    proof = offer.proof
    *most, last = proof.session_token
    wrong = {
        "with another token": replace(proof, session_token=bytes([*most, last ^ 1])).preamble(UP),
        "of another worker": replace(proof, worker=proof.worker + 1).preamble(UP),
        "of another run": replace(proof, run_id="another").preamble(UP),
        "of the other direction": proof.preamble(UP, proven=DOWN),
        "of another stream": proof.preamble(UP)[:32] + other.proof.preamble(UP)[32:],
        "of a nonce that nobody offered": replace(proof, nonce=bytes(32)).preamble(UP),
        "of a direction that there is not": proof.preamble(3),
        "of zeros": bytes(64),
    }
    for which, preamble in wrong.items():
        answer = await offer.said_to(preamble)
        require(not answer, f"the end of a connection with a proof {which}", answer.hex())
    await offer.lanes()


@CHECKS.add("lane.once", "17")
async def proofs_are_good_once(line: LineUnderTest) -> None:
    """A proof opens one connection, and not another one."""
    offer = await Offer.of(line.players[0])
    await offer.lane(UP)
    answer = await offer.said_to(offer.proof.preamble(UP))
    require(not answer, "the end of a second connection with one proof", answer.hex())


@CHECKS.add("lane.fallback", "17")
async def grpc_stays(line: LineUnderTest) -> None:
    """A stream whose lanes are not both opened goes on over gRPC."""
    round_ = await line.deal()
    for player in round_.players:
        offer = await Offer.of(player)
        _, half = await offer.lane(UP)
        half.close()
        player.bulk = offer.talk
    await _expect_averages(round_)


@CHECKS.add("lane.frame", "17")
async def frames_are_checked(line: LineUnderTest) -> None:
    """A frame that breaks a rule ends the stream, with a status that says so."""
    round_ = await line.deal()
    player = round_.players[0]
    whole = _gradient(round_, player)
    head, payload = split(whole)
    opening = reducer_pb2.ReduceRequest(open_round=reducer_pb2.OpenRound(run_id="x"))
    abstain = round_.abstention(player).SerializeToString()
    invalid = {
        "without a head": frame(b"", b""),
        "with a payload that is too short": frame(head, payload[:-1]),
        "without its payload": frame(head, b""),
        "with a payload in its head": frame(whole.SerializeToString(), payload),
        "with a payload beside an abstention": frame(abstain, payload),
        "with an OpenRound": frame(opening.SerializeToString(), b""),
        "of an unknown case": frame(b"\xca\x3e\x00", b""),
        "with a head that is cut short": frame(head[:-1], payload),
    }
    too_large = {
        "with a head above 64 KiB": struct.pack("<II", _MAX_HEAD + 1, 0),
        "with a payload of 4 GiB": struct.pack("<II", len(head), 2**32 - 1) + head,
    }
    for code, frames in (("INVALID_ARGUMENT", invalid), ("RESOURCE_EXHAUSTED", too_large)):
        for which, data in frames.items():
            (talk,) = await _take_to_lanes([player])
            await talk.send(data)
            await talk.ends_with(code, f"after a frame {which} the status")


async def _lanes_in_use(round_: AssignedRound) -> LaneTalk:
    """The first rank's stream, on whose lanes messages went up and down."""
    player = round_.players[0]
    (talk,) = await _take_to_lanes([player])
    await talk.send(_gradient(round_, player))
    # The answer to an old key shows that the listener has read both frames.
    await talk.send(round_.abstention(player, key=Key(1, 1)))
    await talk.take("stale_round")
    return talk


@CHECKS.add("lane.grpc", "17")
async def messages_keep_to_the_lanes(line: LineUnderTest) -> None:
    """A message over gRPC beside open lanes ends the stream with INVALID_ARGUMENT."""
    round_ = await line.deal()
    talk = await _lanes_in_use(round_)
    await talk.call.send(_gradient(round_, round_.players[0]))
    await talk.ends_with("INVALID_ARGUMENT")


@CHECKS.add("lane.end", "17")
async def lanes_end_together(line: LineUnderTest) -> None:
    """The end of the lane up ends the call and the lane down; the end of the call ends both
    lanes.
    """
    round_ = await line.deal()
    talk = await _lanes_in_use(round_)
    talk.close_lane(UP)
    await talk.end()
    talk = await _lanes_in_use(round_)
    await talk.call.cancel()
    await talk.end()


@CHECKS.add("lane.voids", "2.5", workers=2)
async def a_lost_lane_voids_the_round(line: LineUnderTest) -> None:
    """A lane that breaks in a round voids it: the others get RoundAborted."""
    round_ = await line.deal()
    lost, other = round_.players[:2]
    talks = await _take_to_lanes([lost, other])
    parts = round_.rough_parts()
    # Another chunk each, so that none is averaged.
    for player, talk, chunk in zip((lost, other), talks, round_.chunks, strict=False):
        await talk.send(round_.chunk_message(player, parts[player], chunk))
    talks[0].close_lane(UP)
    aborted = await talks[1].take("round_aborted")
    same("the key", conversion.key_to_proto(round_.key), aborted.key)


def _gradient(round_: AssignedRound, player: Player) -> reducer_pb2.ReduceRequest:
    return round_.chunk_message(player, round_.rough_parts()[player], round_.chunks[0])
