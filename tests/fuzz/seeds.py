"""Seeds: a first corpus of valid messages, from the tests' strategies and the vectors.

Run it to write what is missing: python tests/fuzz/seeds.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
from hypothesis import strategies as st

from andon.protocol.messages import (
    Abstain,
    BlockGradient,
    EnterRound,
    RingChunk,
    RingHeader,
    RingStage,
)
from andon.protocol.peer_calls import Call, CallKind
from andon.protocol.peer_frames import Begin
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Liveness, Policy, RunPlan
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion, layouts
from andon.wire.frames import (
    batch_requests,
    batch_responses,
    frame_pass,
    frame_request,
    frame_response,
)
from andon.wire.peer_frames import peer_head
from fuzz.passing import sessions
from scenarios.line_bench import LAYOUT
from unit.andon import strategies
from vectors.lanes import FRAMES, PROOFS, REFUSED
from vectors.peers import peers_file
from vectors.session_samples import peer_frames

__all__ = ["CORPUS", "seeds"]

CORPUS = Path(__file__).with_name("corpus")
_EACH = 24
_Value = TypeVar("_Value")


def seeds() -> dict[str, Iterable[bytes]]:
    """Valid messages for each target."""
    return {
        "requests": _framed(strategies.requests, frame_request, batch_requests),
        "responses": _framed(strategies.responses, frame_response, batch_responses),
        "ring": map(frame_pass, _ring()),
        "layout": (
            layouts.layout_to_proto(each).SerializeToString()
            for each in _drawn(strategies.layouts())
        ),
        "answers": (each.SerializeToString() for each in _answers()),
        "session": _sessions(),
        "reducing": _reducing(),
        "lanes": _lanes(),
        "peers": _peers(),
        "passing": (_spoken(*each) for each in sessions()),
        "preambles": (bytes.fromhex(each["preamble"] + each["answer"]) for each in PROOFS),
    }


def _drawn(strategy: st.SearchStrategy[_Value]) -> list[_Value]:
    found: list[_Value] = []

    @hypothesis.settings(max_examples=_EACH, derandomize=True, database=None, deadline=None)
    @hypothesis.given(strategy)
    def draw(value: _Value) -> None:
        found.append(value)

    draw()
    return found


def _framed(
    strategy: st.SearchStrategy[_Value],
    write: Callable[[_Value], bytes],
    batch: Callable[[list[bytes]], bytes],
) -> list[bytes]:
    frames = [write(each) for each in _drawn(strategy)]
    return [*frames, batch(frames[:3]), batch(frames[3:5])]


def _ring() -> Iterator[EnterRound | RingHeader | RingChunk]:
    key = Key(5, 7)
    yield EnterRound(key=key, rank=1, world_size=3, token=bytes(32))
    yield RingHeader(key=key, rank=0, weight=2.5, first_block=1, stop_block=4)
    for stage in RingStage:
        yield RingChunk(
            key=key, stage=stage, block=1, offset=64, count=2, payload=memoryview(bytes(8))
        )


def _answers() -> Iterator[pb.TrainResponse]:
    key = conversion.key_to_proto(Key(5, 7))
    accepted = pb.JoinAccepted(
        worker=1,
        session_token=bytes(32),
        plan=conversion.plan_to_proto(RunPlan(global_batch=4, dataset_size=10)),
        policy=conversion.policy_to_proto(Policy()),
        liveness=conversion.liveness_to_proto(Liveness()),
        join_status=pb.JOIN_STATUS_IN_SYNC,
        head=key,
        step=3,
    )
    yield pb.TrainResponse(join_accepted=accepted)
    for record in _drawn(strategies.records()):
        committed = pb.StepCommitted(record=conversion.record_to_proto(record), loss=1.5, samples=4)
        yield pb.TrainResponse(step_committed=committed)
    for evidence in _drawn(strategies.evidences):
        halt = pb.Halt(evidence=conversion.evidence_to_proto(evidence))
        yield pb.TrainResponse(halt=halt)
    yield pb.TrainResponse(
        shard_assignment=pb.ShardAssignment(
            key=key,
            roster=[0, 1],
            world_size=2,
            step=1,
            positions=[conversion.range_to_proto(PositionRange(0, 2))],
            batch=conversion.range_to_proto(PositionRange(0, 4)),
        )
    )
    yield pb.TrainResponse(round_voided=pb.RoundVoided(key=key, message="a loss"))
    yield pb.TrainResponse(shutdown=pb.Shutdown(message="over"))
    yield pb.TrainResponse(state_transfer=pb.StateTransfer(transfer_id=1, head=key, peer=1))
    yield pb.TrainResponse(
        scalar_all_reduce_result=pb.ScalarAllReduceResult(head=key, sequence=0, value=1, weight=2)
    )


def _spoken(*messages: tuple[int, bytes]) -> bytes:
    return b"".join(
        bytes([command]) + len(data).to_bytes(2, "big") + data for command, data in messages
    )


def _sessions() -> Iterator[bytes]:
    join = pb.TrainRequest(
        join=pb.Join(
            run_id="sim",
            incarnation=9,
            protocol_version=1,
            layout=layouts.layout_to_proto(LAYOUT),
            plan=conversion.plan_to_proto(RunPlan(global_batch=4, dataset_size=10, seed=3)),
        )
    ).SerializeToString()
    key = conversion.key_to_proto(Key((1 << 32) + 1, 1))
    later = [
        pb.TrainRequest(heartbeat=pb.Heartbeat(sequence=1)),
        pb.TrainRequest(
            heartbeat=pb.Heartbeat(
                sequence=2, scalars=[pb.LoggedScalar(name="val/loss", step=1, value=0.5)]
            )
        ),
        pb.TrainRequest(request_work=pb.RequestWork(head=key)),
        pb.TrainRequest(step_ready=pb.StepReady(key=key, loss_sum=1, weight=2, samples=2)),
        pb.TrainRequest(fault=pb.Fault(key=key, kind=pb.FAULT_KIND_PROTOCOL, message="x")),
        pb.TrainRequest(state_report=pb.StateReport(transfer_id=1, head=key)),
        pb.TrainRequest(scalar_all_reduce=pb.ScalarAllReduce(head=key, value=1, weight=1)),
        pb.TrainRequest(leave=pb.Leave(reason=pb.LEAVE_REASON_FAILED, message="bye")),
    ]
    frames = [each.SerializeToString() for each in later]
    yield _spoken((0, join))
    for each in frames:
        yield _spoken((0, join), (9, each), (8, frames[0]))
    yield _spoken((0, join), *((9, each) for each in frames))
    yield _spoken((0, join), (9, frames[0]), (0, join), (9, frames[3]))


def _reducing() -> Iterator[bytes]:
    def chunk(rank: int, **more: object) -> bytes:
        fields: dict[str, object] = {
            "key": Key(5, 7),
            "rank": rank,
            "world_size": 2,
            "block": 0,
            "offset": 0,
            "count": 2,
            "weight": 1.0,
            "payload": memoryview(bytes(8)),
        }
        return frame_request(BlockGradient(**{**fields, **more}))  # type: ignore[arg-type]  # of these types

    away = frame_request(Abstain(key=Key(5, 7), rank=1, world_size=2))
    newer = chunk(0, key=Key(5, 8))
    yield _spoken((0, chunk(0)), (1, chunk(1)))
    yield _spoken((0, chunk(0)), (1, away), (0, newer), (1, chunk(1)))
    yield _spoken((0, batch_requests([chunk(0), chunk(0, block=1)])), (1, chunk(1)), (1, away))
    yield _spoken((0, chunk(0)), (1, chunk(1, count=1, payload=memoryview(bytes(4)))))
    yield _spoken((0, chunk(0, weight=float("nan"))), (1, chunk(1)))


def _lanes() -> Iterator[bytes]:
    wrappers = ("andon.v1.ReduceRequest", "andon.v1.ReduceResponse", "andon.v1.PassRequest")
    for number, name in enumerate(wrappers):
        frames = [bytes.fromhex(each["frame"]) for each in FRAMES if each["type"] == name]
        bad = [bytes.fromhex(each["frame"]) for each in REFUSED if each["type"] == name]
        for each in (*frames, *bad, b"".join(frames)):
            yield bytes([number]) + each[:2048]


def _peers() -> Iterator[bytes]:
    for case in json.loads(peers_file())["frames"]:
        yield bytes.fromhex(case["head"])
    for each in peer_frames().values():
        yield each.SerializeToString()
    for kind in CallKind:
        call = Call(
            kind=kind,
            reduction="sum" if kind.reduces else "",
            root=1 if kind.has_root else None,
        )
        yield peer_head(Begin(7, 1, call, 1, 64, kind is CallKind.SEND), checksums=True)


def main() -> None:
    """Writes the seeds; each file is named after its digest."""
    for name, inputs in seeds().items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for data in inputs:
            (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main()
