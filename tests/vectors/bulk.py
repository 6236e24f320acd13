"""Samples of the data plane: contributions, averages, state, and messages of a ring."""

from __future__ import annotations

import hashlib
from typing import Any

from google.protobuf.message import Message

from andon.v1 import layout_pb2, record_pb2, reducer_pb2, ring_pb2
from vectors.names import BLOCK_ELEMENTS, KEY, PARENT, TERM, TOKEN

__all__ = ["average", "data_plane", "gradient", "node", "ring"]

_STATE_FILE = "andon-state-0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def gradient(**fields: Any) -> reducer_pb2.BlockGradient:
    """Three float32 numbers of rank 1 (1.0, -2.5 and 3.5); `fields` replace its own."""
    given: dict[str, Any] = {
        "key": KEY,
        "operation": reducer_pb2.OPERATION_WEIGHTED_MEAN,
        "rank": 1,
        "world_size": 2,
        "block": 3,
        "element_offset": 300,
        "element_count": 3,
        "weight": 32.0,
        "encoding": layout_pb2.ENCODING_FLOAT32,
        "payload": bytes.fromhex("0000803f000020c000006040"),
    }
    given.update(fields)
    return reducer_pb2.BlockGradient(**given)


def node(**fields: Any) -> reducer_pb2.TreeNode:
    """Grains 4 to 7 of a batch of 11; `fields` replace its own."""
    given: dict[str, Any] = {"first": 4, "grains": 4, "batch_grains": 11, "grain": 8}
    given.update(fields)
    return reducer_pb2.TreeNode(**given)


def average(**fields: Any) -> reducer_pb2.AveragedBlock:
    """The same numbers on their way back; `fields` replace its own."""
    given: dict[str, Any] = {
        "key": KEY,
        "operation": reducer_pb2.OPERATION_WEIGHTED_MEAN,
        "contributors": 2,
        "world_size": 2,
        "block": 3,
        "element_offset": 300,
        "element_count": 3,
        "total_weight": 64.0,
        "encoding": layout_pb2.ENCODING_FLOAT32,
        "payload": bytes.fromhex("0000803f000020c000006040"),
    }
    given.update(fields)
    return reducer_pb2.AveragedBlock(**given)


def data_plane() -> list[Message]:
    """A message of each kind between worker and reducer."""
    offer = reducer_pb2.SharedMemoryOffer(name="andon-a1", size_bytes=4096, nonce_offset=64)
    transfer: dict[str, Any] = {
        "run_id": "7f3a",
        "worker": 1,
        "session_token": TOKEN,
        "transfer_id": 7,
    }
    abstain = reducer_pb2.Abstain(key=KEY, group=2, sequence=1, rank=1, world_size=2)
    corrupt = reducer_pb2.CorruptChunk(rank=1, block=3, element=300)
    aborted = reducer_pb2.RoundAborted(
        key=KEY, message="a chunk of rank 1 was changed", corrupt=corrupt
    )
    return [
        reducer_pb2.OpenRound(
            run_id="7f3a",
            worker=1,
            session_token=TOKEN,
            capabilities=["crc32c.v1", "shared-memory.v1"],
            block_elements=BLOCK_ELEMENTS,
            shared_folder=TOKEN,
            listens=True,
            contribution_areas=3,
        ),
        gradient(
            group=2, sequence=1, answer_encoding=layout_pb2.ENCODING_BFLOAT16, padding=b"\0\0"
        ),
        abstain,
        reducer_pb2.SharedMemoryMapped(contributions_nonce=TOKEN[:16], averages_nonce=TOKEN[16:]),
        reducer_pb2.ReduceRequestBatch(
            requests=[
                reducer_pb2.ReduceRequest(block_gradient=gradient()),
                reducer_pb2.ReduceRequest(abstain=abstain),
            ]
        ),
        reducer_pb2.RoundOpened(
            capabilities=["crc32c.v1"],
            max_payload_bytes=4128768,
            contributions=offer,
            averages=reducer_pb2.SharedMemoryOffer(
                name="andon-a2", size_bytes=8192, nonce_offset=128
            ),
            shared_memory_refused="the folder is full",
            tcp=reducer_pb2.TcpOffer(
                port=50052, nonce=TOKEN, reports=True, connections=16, adaptive=True
            ),
        ),
        average(group=2, sequence=1, padding=b"\0\0"),
        reducer_pb2.BlockFault(
            key=KEY,
            group=2,
            sequence=1,
            kind=reducer_pb2.BLOCK_FAULT_KIND_NON_FINITE,
            rank=0,
            block=3,
            element=302,
            value="nan",
            message="rank 0 contributed nan",
        ),
        reducer_pb2.StaleRound(key=KEY, greatest=record_pb2.Key(term=TERM, round=12)),
        aborted,
        reducer_pb2.ReduceResponseBatch(
            responses=[
                reducer_pb2.ReduceResponse(averaged_block=average()),
                reducer_pb2.ReduceResponse(round_aborted=aborted),
            ]
        ),
        reducer_pb2.PutStateRequest(
            **transfer,
            head=PARENT,
            size_bytes=5,
            sha256=hashlib.sha256(b"state").digest(),
            base_bytes=1,
            base_sha256=hashlib.sha256(b"e").digest(),
        ),
        reducer_pb2.PutStateResponse(
            offset=2, base_bytes=1, shared_folder=TOKEN, file_name=_STATE_FILE
        ),
        reducer_pb2.GetStateRequest(
            **transfer,
            head=PARENT,
            offset=2,
            sha256=hashlib.sha256(b"state").digest(),
            base_sha256=hashlib.sha256(b"e").digest(),
            shared_folder=TOKEN,
            file_name=_STATE_FILE,
        ),
        reducer_pb2.GetStateResponse(
            size_bytes=5, sha256=hashlib.sha256(b"state").digest(), offset=2, base_bytes=1
        ),
        offer,
        reducer_pb2.ReportLanesRequest(nonce=TOKEN),
        reducer_pb2.ReportLanesResponse(
            received_bytes=4128801, reading=True, sent_bytes=2064409, connections=4
        ),
        reducer_pb2.SharedMemorySlice(offset=1772, length=12, generation=5),
        node(),
    ]


def ring() -> list[Message]:
    """A message of each kind between the ranks of a ring."""
    return [
        ring_pb2.EnterRound(key=KEY, rank=1, world_size=3, token=TOKEN),
        ring_pb2.RingHeader(
            key=KEY,
            sequence=1,
            rank=2,
            weight=16.0,
            operation=reducer_pb2.OPERATION_BROADCAST,
            first_block=1,
            stop_block=4,
            data_bytes=1024,
            data_head=TOKEN,
            crc32c=True,
        ),
        ring_pb2.RingChunk(
            key=KEY,
            sequence=1,
            stage=ring_pb2.RING_STAGE_PARTIAL_SUM,
            block=3,
            element_offset=300,
            element_count=2,
            encoding=layout_pb2.ENCODING_FLOAT32,
            padding=b"\0",
            payload=bytes.fromhex("0000803f000020c0"),
        ),
        ring_pb2.PassResponse(greatest=record_pb2.Key(term=TERM, round=12)),
        ring_pb2.ReportLaneRequest(nonce=TOKEN),
        ring_pb2.ReportLaneResponse(received_bytes=4128801, reading=True),
    ]
