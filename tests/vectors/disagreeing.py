"""Messages that contradict each other, or can't be averaged, with the reducer's answer."""

from __future__ import annotations

from typing import Any

from andon.v1 import layout_pb2, record_pb2, reducer_pb2
from vectors.averages import faults_of_values
from vectors.book import rows
from vectors.bulk import gradient
from vectors.names import KEY

__all__ = ["faults_file"]

Said = tuple[int, int, reducer_pb2.ReduceRequest]
"""The stream and the worker that say it, and the message."""


def faults_file() -> bytes:
    """`faults.json`."""
    about = (
        "Contributions that a reducer must not average, each with the BlockFault that goes to "
        "every stream of the round; docs/protocol-servers.md, What a reducer answers. Either "
        "ranks, whose payloads are hexadecimal, or messages (ReduceRequest, hexadecimal), by "
        "stream and worker in the order of their arrival. The first message that contradicts is "
        "the one answered."
    )
    return rows("faults", about, [*faults_of_values(), *_disagreements()])


def _disagreements() -> list[dict[str, Any]]:
    first = _gives(0)
    other = gradient(rank=1, block=3, element_offset=303)
    bf16 = {"encoding": layout_pb2.ENCODING_BFLOAT16, "payload": bytes(6)}
    broadcast = {"operation": reducer_pb2.OPERATION_BROADCAST}
    cases: list[tuple[str, list[Said], int]] = [
        ("a weight of 0 with a payload", [_gives(1, weight=0.0)], 1),
        ("a negative weight", [_gives(1, weight=-1.0)], 1),
        ("a weight that is NaN", [_gives(1, weight=float("nan"))], 1),
        ("an infinite weight", [_gives(1, weight=float("inf"))], 1),
        ("two weights of one rank", [_gives(1), _said(1, 1, other, weight=31.0)], 1),
        ("ranks that count differently", [first, _gives(1, world_size=3)], 1),
        ("ranks that encode differently", [first, _gives(1, **bf16)], 1),
        ("ranks that want other answers", [first, _gives(1, answer_encoding=3)], 1),
        ("ranks that cut differently", [first, _gives(1, element_count=2, payload=bytes(8))], 1),
        ("ranks that do different things", [first, _gives(1, **broadcast)], 1),
        ("a broadcast by another rank than 0", [_gives(1, **broadcast)], 1),
        ("a chunk twice, on two streams", [_gives(1), (2, 1, _gives(1)[2])], 1),
        ("two workers of one rank", [first, (2, 5, first[2])], 0),
        ("two ranks of one worker", [first, (2, 0, _gives(1)[2])], 1),
        ("abstaining twice", [_abstains(1), _abstains(1)], 1),
        ("abstaining after a contribution", [_gives(1), _abstains(1)], 1),
        ("a contribution after abstaining", [_abstains(1), _gives(1)], 1),
    ]
    return [
        {
            "name": name,
            "messages": [
                {
                    "stream": stream,
                    "worker": worker,
                    "bytes": message.SerializeToString(deterministic=True).hex(),
                }
                for stream, worker, message in said
            ],
            "answer": {"kind": "INCONSISTENT", "rank": rank},
        }
        for name, said, rank in cases
    ]


def _gives(rank: int, **fields: Any) -> Said:
    return rank, rank, reducer_pb2.ReduceRequest(block_gradient=gradient(rank=rank, **fields))


def _said(stream: int, worker: int, body: reducer_pb2.BlockGradient, *, weight: float) -> Said:
    body.weight = weight
    return stream, worker, reducer_pb2.ReduceRequest(block_gradient=body)


def _abstains(rank: int) -> Said:
    key = record_pb2.Key()
    key.CopyFrom(KEY)
    abstain = reducer_pb2.Abstain(key=key, rank=rank, world_size=2)
    return rank, rank, reducer_pb2.ReduceRequest(abstain=abstain)
