"""Calls that lie, at a ring that trains with PyTorch: it goes on, and ends with equal weights.

The liars register reducers, enter the ring's rounds, and carry states of transfers that nobody
ordered, with messages that are right except for some bytes, some order or some length. Meanwhile a
newcomer gets the line's real state. `ANDON_ATTACK_SECONDS` says how long; `make soak` raises it.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from andon.protocol import tokens
from andon.protocol.messages import EnterRound, RingHeader
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2, reducer_pb2
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire.frames import frame_pass
from andon_coordinator.transport.reader import JournalReader
from hostile.attacks import GET, INSIDER, PUT, REGISTER
from hostile.rig import SECRET, secret_flags
from integration.andon_trainer.test_ring import PASS
from integration.harness import Service, Worker, on_line, start_line, start_worker
from integration.strangers import end_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("ANDON_ATTACK_SECONDS", "2"))
ENDLESS: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 10**6}
CALL_S = 2.0
"""A call that is not refused by then is cancelled: the next one may lie better."""


class Liar:
    """Says messages that are nearly right on one call after another, and counts their ends."""

    def __init__(self, address: str, method: str, seed: int) -> None:
        self._address, self._method = address, method
        self.chance = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def lie(self, make: Callable[[random.Random], Sequence[bytes]], until: float) -> None:
        """Calls until the time is over; `make` makes the messages of a call."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self._address, options=options) as channel:
            while time.monotonic() < until or not self.ends:
                call: Any = channel.stream_stream(self._method)
                said = self._said(make(self.chance))
                self.ends[str(end_of(call(said, timeout=CALL_S)))] += 1

    def _said(self, messages: Sequence[bytes]) -> Iterator[bytes]:
        chance = self.chance
        said = [_bent(each, chance) if chance.random() < 0.5 else each for each in messages]
        if chance.random() < 0.3:
            chance.shuffle(said)
        if chance.random() < 0.3:
            said.insert(chance.randrange(len(said) + 1), chance.choice(said))
        yield from said[: chance.randrange(1, len(said) + 1)]


def _bent(message: bytes, chance: random.Random) -> bytes:
    """A message with some bytes changed, left out or put in."""
    bent = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(bent) + 1)
        match chance.randrange(4):
            case 0:
                bent[at : at + 1] = chance.randbytes(1)
            case 1:
                del bent[at : at + chance.randrange(1, 9)]
            case 2:
                bent[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                bent[at:at] = bent[: chance.randrange(1, 65)]
    return bytes(bent)


def offers(run_id: str) -> Callable[[random.Random], list[bytes]]:
    """Reducers that offer themselves, with a proof that is none."""

    def make(chance: random.Random) -> list[bytes]:
        offer = pb.ReducerOffer(run_id=run_id, protocol_version=1, address="127.0.0.1:9")
        proof = pb.ReducerProof(mac=chance.randbytes(32))
        return [
            pb.RegisterReducerRequest(offer=offer).SerializeToString(),
            pb.RegisterReducerRequest(proof=proof).SerializeToString(),
        ]

    return make


def passes(run_id: str, head: Key) -> Callable[[random.Random], list[bytes]]:
    """A rank of rounds that are over, that are about to come, or that never come; with numbers.

    Its token is noise, of a round that is over, or of another link of the round that it enters:
    that of the same two ranks, the other way round, or of a rank that is on another link.
    """

    def make(chance: random.Random) -> list[bytes]:
        soon = Key(head.term, head.round + chance.randrange(1, 200))
        key = chance.choice([soon, soon, Key(1, 1), Key(2**63, chance.randrange(1, 2**20))])
        rank = chance.randrange(3)
        over = Key(head.term, max(1, head.round - chance.randrange(3)))
        others = [
            (key, rank, rank),
            (key, (rank + 1) % 2, 2),
            (over, rank, (rank + 1) % 2),
            (over, (rank + 1) % 2, rank),
        ]
        links = [tokens.link_token(SECRET, run_id, *link) for link in others]
        token = chance.choice([chance.randbytes(32), *links])
        header = RingHeader(key=key, rank=rank, weight=chance.choice([1.0, 0.0, float("nan")]))
        return [
            bytes(frame_pass(EnterRound(key=key, rank=rank, world_size=2, token=token))),
            bytes(frame_pass(header)),
            chance.randbytes(4096),
        ]

    return make


def _transfer(run_id: str, chance: random.Random) -> dict[str, Any]:
    """What both ends of a transfer say that nobody ordered, with a token that is right."""
    return {
        "run_id": run_id,
        "worker": INSIDER,
        "session_token": tokens.session_token(SECRET, run_id, INSIDER),
        "transfer_id": chance.randrange(2**40, 2**40 + 4),
        "head": record_pb2.Key(term=chance.randrange(1, 3), round=1),
    }


def sent_states(run_id: str) -> Callable[[random.Random], list[bytes]]:
    """States whose size or digest is a lie, or that end early."""

    def make(chance: random.Random) -> list[bytes]:
        content = chance.randbytes(3000)
        digest = chance.choice([hashlib.sha256(content).digest(), bytes(32), b"short"])
        size = chance.choice([3000, 2999, 2**60, 0])
        first = reducer_pb2.PutStateRequest(
            **_transfer(run_id, chance), size_bytes=size, sha256=digest, payload=content[:1000]
        )
        rest = (reducer_pb2.PutStateRequest(payload=content[at : at + 1000]) for at in (1000, 2000))
        return [first.SerializeToString(), *(each.SerializeToString() for each in rest)]

    return make


def wanted_states(run_id: str) -> Callable[[random.Random], list[bytes]]:
    """Receivers of such states."""
    return lambda chance: [
        reducer_pb2.GetStateRequest(**_transfer(run_id, chance)).SerializeToString()
    ]


def ports_of(worker: Worker) -> list[int]:
    """The TCP ports that a process listens on: its neighbour in the ring reaches one of them."""
    sockets = set[str]()
    for each in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(each)):
                sockets.add(found[1])
    ports = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{worker.process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def lied_to(service: Service, workers: Sequence[Worker]) -> dict[str, Counter[str]]:
    """Everybody lies at once, for as long as is set; returns how their calls ended."""
    run_id, until = service.run_id, time.monotonic() + SECONDS
    with JournalReader(service.journal) as journal:
        head = next(journal.ancestry())
    plans: list[tuple[str, str, Callable[[random.Random], Sequence[bytes]]]] = [
        (service.address, REGISTER, offers(run_id)),
        (service.address, PUT, sent_states(run_id)),
        (service.address, GET, wanted_states(run_id)),
        *(
            (f"127.0.0.1:{port}", PASS, passes(run_id, head))
            for each in workers
            for port in ports_of(each)
        ),
    ]
    seed = int(os.environ.get("ANDON_SEED", "27"))
    liars = [Liar(address, method, seed + n) for n, (address, method, _) in enumerate(plans)]
    with ThreadPoolExecutor(len(plans)) as pool:
        lying = [
            pool.submit(liar.lie, plan[2], until) for liar, plan in zip(liars, plans, strict=True)
        ]
        for each in lying:
            each.result()
    ends: dict[str, Counter[str]] = {}
    for liar, (_, method, _) in zip(liars, plans, strict=True):
        ends.setdefault(method, Counter()).update(liar.ends)
    return ends


def test_c_wire_002_a_ring_that_is_lied_to_on_every_call_ends_with_equal_weights(
    tmp_path: Path,
) -> None:
    flags = ("--topology", "ring", "--max-workers", "3", *secret_flags(tmp_path))
    with start_line(tmp_path, ENDLESS, 2, *flags) as (service, workers):
        before = service.await_status(lambda line: line.step >= 3)
        newcomer = start_worker(tmp_path, ENDLESS, slot=2, **on_line(service, 2, 3))
        try:
            ends = lied_to(service, workers)
            after = service.await_status(lambda line: line.participating == 3)
            service.await_status(lambda line: line.step >= after.step + 3)
            with grpc.insecure_channel(service.address) as channel:
                CoordinatorStub(channel).Drain(pb.DrainRequest(operator="test"), timeout=30)
            codes = [worker.wait() for worker in (*workers, newcomer)]
        finally:
            newcomer.process.send_signal(signal.SIGKILL)

    assert codes == [0, 0, 0], "".join(each.output for each in (*workers, newcomer))
    assert after.step > before.step
    assert len({each.seen["digest"] for each in (*workers, newcomer)}) == 1
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.halts() == []
        assert journal.ledger_faults() == []
        assert [gone.reason for gone in journal.departures()] == ["DRAINED"] * 3
    assert not any("OK" in ends[method] for method in (REGISTER, PUT, GET)), ends
    # One of a worker's ports is its ring's; the others end such calls by themselves.
    assert "INVALID_ARGUMENT INVALID_MESSAGE" in ends[PASS], ends
