"""A peer that makes a mistake gets a precise error, and the others' run continues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon.protocol import tokens
from andon.protocol.limits import (
    CHUNK_ELEMENTS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TEXT_BYTES,
)
from andon.protocol.messages import OpenRound, Operation
from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion
from andon.wire.frames import frame_request
from andon_coordinator.transport.reader import JournalReader
from andon_trainer.model.layout import plan_model
from integration.harness import Service, Worker, finish, on_line, start_worker
from integration.reducer_bench import chunks_of
from integration.scripts.train import Model
from integration.strangers import REDUCE, TRAIN, Refused, Stranger, resident_bytes, talk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS, PAUSED = 120, 101
"""The line trains while strangers connect, and waits for the last of them before step `PAUSED`."""
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": STEPS}
PLAN = RunPlan(global_batch=8, dataset_size=40, total_steps=STEPS)
LAYOUT = plan_model([Model()]).layout
MIB = 2**20
MISTAKES, SERIES = 5, 3


@dataclass(frozen=True)
class Busy:
    """A line on which two scripts train, and a stranger that knows its address."""

    folder: Path
    service: Service
    workers: list[Worker]
    stranger: Stranger
    first: Refused
    """The first stranger's error: its dataset has one sample, for two workers."""
    token: bytes
    """A valid session token of worker 7, which is not on the line: it opens a stream."""
    scripts: list[Worker] = field(default_factory=list)

    def join(self, **fields: Any) -> Refused:
        """The end of a Join that is valid except for `fields`."""
        return self.stranger.refused(TRAIN, self.stranger.join(**fields).SerializeToString())

    def reduce(self, *messages: bytes) -> Refused:
        """The end of a stream to the reducer that was opened correctly."""
        opening = OpenRound(self.service.run_id, 7, self.token)
        return self.stranger.refused(REDUCE, frame_request(opening), *messages)

    def goes_on(self) -> bool:
        """Whether the line still runs with both its workers."""
        line = self.service.status()
        return (line.state, line.live, line.participating) == (pb.LINE_STATE_RUNNING, 2, 2)

    def script(self, name: str, *, slot: int, run_id: str = "", **spec: Any) -> Worker:
        """A stranger's training script; it is killed with the line if it still runs."""
        folder = self.folder / f"script-{name}"
        folder.mkdir()
        environment = on_line(self.service, slot, 2)
        environment["ANDON_RUN_ID"] = run_id or self.service.run_id
        script = start_worker(folder, {**SPEC, **spec}, slot=slot, **environment)
        self.scripts.append(script)
        return script


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    folder = tmp_path_factory.mktemp("busy")
    spec = {**SPEC, "pauses": [{"slot": 0, "step": PAUSED, "until": str(folder / "go")}]}
    secret = folder / "secret"
    secret.write_text("the secret of these tests")
    with Service(folder / "run", 2, "--secret-file", str(secret)) as service:
        stranger = Stranger(service.address, service.run_id, LAYOUT, PLAN)
        tiny = conversion.plan_to_proto(replace(PLAN, dataset_size=1))
        first = stranger.refused(TRAIN, stranger.join(plan=tiny).SerializeToString())
        token = tokens.session_token(secret.read_bytes(), service.run_id, 7)
        scripts: list[Worker] = []
        workers = [
            start_worker(folder, spec, slot=slot, **on_line(service, slot, 2)) for slot in range(2)
        ]
        try:
            service.await_status(lambda line: line.step >= 1)
            yield Busy(folder, service, workers, stranger, first, token, scripts)
        finally:
            for worker in workers + scripts:
                worker.kill()


def test_c_shard_001_a_dataset_smaller_than_the_roster_is_refused_by_name(busy: Busy) -> None:
    assert str(busy.first) == "FAILED_PRECONDITION DATASET_TOO_SMALL"
    assert busy.first.metadata == {"component": "dataset_size", "mine": "1", "theirs": "2"}
    assert "a dataset of 1 sample is smaller than the 2 workers of the line" in busy.first.message


def differs(component: str, mine: object, theirs: object) -> dict[str, str]:
    return {"component": component, "mine": str(mine), "theirs": str(theirs)}


def test_c_wire_002_a_control_stream_that_breaks_the_protocol_ends_alone(busy: Busy) -> None:
    beat = pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1))
    # Messages that are wrong in themselves are refused in test_conformance_refusals.py.
    ends = {
        "unknown case": busy.stranger.refused(TRAIN, b"\xfa\x06\x00"),
        "not join": busy.stranger.refused(TRAIN, beat.SerializeToString()),
        "cursor beyond the data set": busy.join(
            head=record_pb2.Key(term=1 << 32, round=1),
            cursor=record_pb2.Cursor(position=PLAN.dataset_size),
        ),
        "too long": busy.stranger.refused(TRAIN, b"\x0a\x00" * MAX_MESSAGE_BYTES),
    }

    # gRPC itself refuses messages that are too long, before Andon reads them.
    assert {name: str(each) for name, each in ends.items()} == {
        **dict.fromkeys(ends, "INVALID_ARGUMENT INVALID_MESSAGE"),
        "too long": "RESOURCE_EXHAUSTED",
    }
    assert "no known case" in ends["unknown case"].message
    assert busy.goes_on()


def gradient(**fields: Any) -> bytes:
    """A chunk that is valid except for `fields`."""
    chunk = chunks_of(0, np.ones(4, np.float32), key=Key(1, 1), world_size=2)[0]
    return frame_request(replace(chunk, **fields))


def of_bytes(size: int) -> bytes:
    """A chunk with a payload of `size` bytes."""
    return gradient(count=size // 4, payload=memoryview(bytes(size)))


def test_c_wire_002_a_data_stream_that_breaks_the_protocol_ends_alone(busy: Busy) -> None:
    wrong_count = gradient().replace(b"\x48\x04", b"\x48\x05")  # field 9, element_count
    again, other = (
        frame_request(OpenRound(busy.service.run_id, worker, busy.token)) for worker in (7, 0)
    )
    ends = {
        "not opened": busy.stranger.refused(REDUCE, gradient()),
        "opened twice": busy.reduce(again),
        "wrong count": busy.reduce(wrong_count),
        "offset off the grid": busy.reduce(gradient(offset=7)),
        "longer than a chunk": busy.reduce(of_bytes(4 * CHUNK_ELEMENTS + 4)),
        "token of another": busy.stranger.refused(REDUCE, other),
        "operation": busy.reduce(gradient(operation=Operation.SUM)),
        "oversized": busy.reduce(of_bytes(MAX_PAYLOAD_BYTES + 4)),
        "too long": busy.reduce(of_bytes(2 * MAX_MESSAGE_BYTES)),
    }

    assert {name: str(each) for name, each in ends.items()} == {
        **dict.fromkeys(ends, "INVALID_ARGUMENT INVALID_MESSAGE"),
        "token of another": "UNAUTHENTICATED TOKEN",
        "operation": "FAILED_PRECONDITION NOT_OFFERED",
        "oversized": "RESOURCE_EXHAUSTED TOO_LARGE",
        "too long": "RESOURCE_EXHAUSTED",
    }
    assert ends["not opened"].message == "the first message is not OpenRound"
    assert f"multiples of {CHUNK_ELEMENTS}" in ends["offset off the grid"].message
    assert "16 bytes of payload for 5 elements" in ends["wrong count"].message
    assert busy.goes_on()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: andon\r\n\r\n",
        b"POST /andon.v1.Coordinator/Train HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(200),
        bytes(range(255, 0, -1)) * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    ],
    ids=["HTTP", "HTTP with a body", "TLS", "noise", "HTTP/2 and noise"],
)
def test_c_wire_002_bytes_that_are_no_grpc_are_hung_up_on(busy: Busy, data: bytes) -> None:
    said = talk(busy.service.address, data)

    assert len(said) < 1000  # gRPC's settings, if anything
    assert busy.goes_on()


def test_a_script_that_does_not_fit_ends_with_code_4_and_what_differs(busy: Busy) -> None:
    scripts = {
        "layout": busy.script("layout", slot=1, vocabulary=18),
        "slot": busy.script("slot", slot=0),
        "run": busy.script("run", slot=1, run_id="f00d"),
    }

    codes = {name: script.wait() for name, script in scripts.items()}

    assert codes == dict.fromkeys(scripts, 4)
    assert {name: script.seen for name, script in scripts.items()} == {
        "layout": {
            "reason": "layout_differs",
            **differs("head.weight", "float32[18, 8]", "float32[17, 8]"),
        },
        "slot": {"reason": "slot", **differs("launch_slot", 0, "taken")},
        "run": {"reason": "wrong_run", **differs("run_id", "f00d", busy.service.run_id)},
    }
    assert (
        "JoinRefused: head.weight is float32[18, 8] at the worker and float32[17, 8] on the line"
        in scripts["layout"].output
    )
    assert busy.goes_on()


def test_nobodys_mistake_costs_memory(busy: Busy) -> None:
    pid, log = busy.service.process.pid, busy.service.folder / "service.log"
    talkative = busy.stranger.join(run_id="é" * (3 * MIB // 2)).SerializeToString()
    mistakes = [
        (TRAIN, talkative, "NOT_FOUND WRONG_RUN"),
        (TRAIN, b"\x0a\x00" * MAX_MESSAGE_BYTES, "RESOURCE_EXHAUSTED"),
        (REDUCE, of_bytes(MAX_PAYLOAD_BYTES), "INVALID_ARGUMENT INVALID_MESSAGE"),
        (REDUCE, bytes(MAX_MESSAGE_BYTES), "INVALID_ARGUMENT INVALID_MESSAGE"),
    ]

    def make_all() -> None:
        for method, message, end in mistakes:
            assert str(busy.stranger.refused(method, message)) == end
        talk(busy.service.address, bytes(4 * MIB))

    make_all()  # once to warm up: an allocator keeps what it was given first
    logged, grown = log.stat().st_size, []
    for _ in range(SERIES):
        before = resident_bytes(pid)
        for _ in range(MISTAKES):
            make_all()
        grown.append(resident_bytes(pid) - before)

    # An allocator may occasionally take a little more; a leak grows each time.
    sent_bytes = MISTAKES * 23 * MIB
    assert min(grown) < sent_bytes / 10, grown
    assert log.stat().st_size - logged < SERIES * MISTAKES * 4 * MAX_TEXT_BYTES
    assert busy.goes_on()


def test_the_run_of_the_others_is_not_disturbed_and_ends_with_equal_digests(busy: Busy) -> None:
    (busy.folder / "go").touch()

    seen = finish(busy.workers)

    assert len({each["digest"] for each in seen}) == 1
    assert [each["step"] for each in seen] == [STEPS, STEPS]
    assert busy.service.scrape().shown("andon_step_attempts_total", "cause") == {"first": STEPS}
    with JournalReader(busy.service.journal) as journal:
        assert (journal.steps(), journal.halts(), journal.ledger_faults()) == (STEPS, [], [])
        assert len(set(journal.digests().values())) == 1
