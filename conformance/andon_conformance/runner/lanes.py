"""TCP lanes: what opens them, what travels on them, and what ends them (section 17)."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from google.protobuf.message import Message

from andon.host.tls import client_context
from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire import conversion
from andon_conformance.lane_format import (
    CAPABILITY,
    DOWN,
    NONCE_BYTES,
    PROOF_BYTES,
    UP,
    Proof,
    frame,
    read_frame,
)
from andon_conformance.runner.checks import Checks, NotApplicable, Violation, require, same
from andon_conformance.runner.gradients import AssignedRound
from andon_conformance.runner.line import LineUnderTest
from andon_conformance.runner.player import Player
from andon_conformance.runner.talk import Status, Talk

__all__ = ["CHECKS"]


def split(message: reducer_pb2.ReduceRequest) -> tuple[bytes, bytes]:
    """Head and payload of a message's frame."""
    head, payload = reducer_pb2.ReduceRequest.FromString(message.SerializeToString()), b""
    if head.WhichOneof("message") == "block_gradient":
        payload = head.block_gradient.payload
        head.block_gradient.ClearField("payload")
    return head.SerializeToString(), payload


def framed(message: reducer_pb2.ReduceRequest) -> bytes:
    """A message as one frame."""
    return frame(*split(message))


class Offer:
    """A call of Reduce that offers lanes, before any is opened."""

    def __init__(
        self,
        player: Player,
        talk: Talk[reducer_pb2.ReduceResponse],
        opened: reducer_pb2.RoundOpened,
    ) -> None:
        """Takes a call whose RoundOpened was read."""
        self.player, self.talk, self.opened = player, talk, opened
        self.proof = Proof(
            run_id=player.accepted.run_id or player.target.run_id,
            worker=player.worker,
            session_token=player.accepted.session_token,
            nonce=opened.tcp.nonce,
        )
        self._tls = player.target.reach.access.tls_dir
        self._host = player.data_address.rpartition(":")[0].strip("[]")

    @classmethod
    async def of(cls, player: Player) -> Offer:
        """Opens a data stream that asks for lanes.

        Raises:
            NotApplicable: the server offers none.
        """
        talk = await player.open_bulk(capabilities=(CAPABILITY,))
        opened = await talk.take("round_opened")
        if CAPABILITY not in opened.capabilities:
            await talk.cancel()
            raise NotApplicable("the server offers no TCP lanes")
        good = opened.HasField("tcp") and 0 < opened.tcp.port < 2**16
        require(good, "an offer with a port", opened.tcp)
        size = len(opened.tcp.nonce)
        require(size == NONCE_BYTES, f"a nonce of {NONCE_BYTES} bytes", size)
        return cls(player, talk, opened)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has said nothing yet."""
        context: ssl.SSLContext | None = None if self._tls is None else client_context(self._tls)
        try:
            async with asyncio.timeout(self.player.target.patience_s):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self.opened.tcp.port,
                    ssl=context,
                    server_hostname=None if context is None else self._host,
                )
        except (OSError, TimeoutError) as error:
            where = f"{self._host}:{self.opened.tcp.port}"
            raise Violation(f"a listener at {where}, as offered", str(error)) from None
        self.player.connections.append(writer)
        return reader, writer

    async def said_to(self, preamble: bytes) -> bytes:
        """What the listener says to a preamble before it hangs up, or its whole answer."""
        reader, writer = await self.connect()
        answer = b""
        try:
            writer.write(preamble)
            async with asyncio.timeout(self.player.target.patience_s):
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    answer = await reader.read(PROOF_BYTES)
        except TimeoutError:
            raise Violation("an answer, or the connection's end", "neither in time") from None
        finally:
            writer.close()
        return answer

    async def lane(self, direction: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A lane on which both sides have proven themselves."""
        reader, writer = await self.connect()
        writer.write(self.proof.preamble(direction))
        answer = b""
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(self.player.target.patience_s):
                answer = await reader.readexactly(PROOF_BYTES)
        right = self.proof.answer(direction)
        require(answer == right, f"the answer {right.hex()}", answer.hex() or "nothing")
        return reader, writer

    async def lanes(self) -> LaneTalk:
        """The stream with both its lanes, as checks talk to any stream."""
        _, up = await self.lane(UP)
        down = await self.lane(DOWN)
        return LaneTalk(self.talk, up, down, patience_s=self.player.target.patience_s)


class LaneTalk(Talk[reducer_pb2.ReduceResponse]):
    """A stream whose messages travel on its lanes. It ends as its call does."""

    def __init__(
        self,
        call: Talk[reducer_pb2.ReduceResponse],
        up: asyncio.StreamWriter,
        down: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        patience_s: float,
    ) -> None:
        """Starts to read. The call itself is read only for its end."""
        self.call = call
        self._up = up
        self._down, self._down_writer = down
        super().__init__(None, f"the lanes of {call.who}", patience_s=patience_s)

    async def send(self, message: Message | bytes) -> None:
        """Sends a message as a frame, and bytes as they are."""
        data = framed(message) if isinstance(message, reducer_pb2.ReduceRequest) else message
        assert isinstance(data, bytes)
        try:
            async with asyncio.timeout(self._patience_s), self._writing:
                # Raw bytes are a test's own frame, right or wrong.
                self._up.write(data)
                await self._up.drain()
        except ConnectionError:
            return
        except TimeoutError:
            raise self._silence(f"{self.who} can send") from None

    def close_lane(self, direction: int) -> None:
        """Closes one lane."""
        (self._up if direction == UP else self._down_writer).close()

    async def finish(self) -> Status:
        """Ends the sending half of the call, then waits for its end."""
        return await self.call.finish()

    async def cancel(self) -> None:
        """Breaks the call and its lanes, as a dying process does."""
        for direction in (UP, DOWN):
            self.close_lane(direction)
        await self.call.cancel()
        await asyncio.wait({self._reader}, timeout=self._patience_s)

    async def _read(self) -> None:
        try:
            while (message := await self._next()) is not None:
                self.inbox.append(message)
                self._stirred.set()
            # The lane down ends first: only the call says why.
            self.status = await self.call.end()
        finally:
            self._stirred.set()

    async def _next(self) -> reducer_pb2.ReduceResponse | None:
        """The next message on the lane down; None once that ends."""
        try:
            head, payload = await read_frame(self._down)
        except (asyncio.IncompleteReadError, OSError):
            return None
        message = reducer_pb2.ReduceResponse.FromString(head)
        if message.WhichOneof("message") == "averaged_block":
            message.averaged_block.payload = payload
        return message


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
    # Only the lane up: the call itself stays open, and must end with it.
    talks[0].close_lane(UP)
    aborted = await talks[1].take("round_aborted")
    same("the key", conversion.key_to_proto(round_.key), aborted.key)


def _gradient(round_: AssignedRound, player: Player) -> reducer_pb2.ReduceRequest:
    return round_.chunk_message(player, round_.rough_parts()[player], round_.chunks[0])
