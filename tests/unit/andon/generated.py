"""The data plane's messages as generated code has them, made from plain values field by field."""

from __future__ import annotations

from typing import Any

from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    CorruptChunk,
    OpenRound,
    Request,
    Response,
    RoundAborted,
    RoundOpened,
    SharedMemoryMapped,
    SharedMemoryOffer,
    Slice,
    StaleRound,
    TcpOffer,
)
from andon.protocol.records import Key
from andon.v1 import record_pb2, reducer_pb2


def key(value: Key) -> record_pb2.Key:
    return record_pb2.Key(term=value.term, round=value.round)


def content(message: BlockGradient | AveragedBlock, padding: bytes) -> dict[str, Any]:
    """The numbers, or where they lie."""
    where = message.slice
    if where is None:
        return {"padding": padding, "payload": bytes(message.payload)}
    return {"slice": slice_of(where)}


def slice_of(where: Slice) -> reducer_pb2.SharedMemorySlice:
    return reducer_pb2.SharedMemorySlice(
        offset=where.offset, length=where.length, generation=where.generation
    )


def offer(value: SharedMemoryOffer | None) -> reducer_pb2.SharedMemoryOffer | None:
    if value is None:
        return None
    return reducer_pb2.SharedMemoryOffer(
        name=value.name, size_bytes=value.size_bytes, nonce_offset=value.nonce_offset
    )


def tcp_offer(value: TcpOffer | None) -> reducer_pb2.TcpOffer | None:
    if value is None:
        return None
    return reducer_pb2.TcpOffer(port=value.port, nonce=value.nonce, reports=value.reports)


def corrupt_chunk(value: CorruptChunk | None) -> reducer_pb2.CorruptChunk | None:
    if value is None:
        return None
    return reducer_pb2.CorruptChunk(rank=value.rank, block=value.block, element=value.element)


def number(member: Any) -> Any:
    return member.value


def request(message: Request, padding: bytes = b"") -> reducer_pb2.ReduceRequest:
    match message:
        case OpenRound():
            return reducer_pb2.ReduceRequest(
                open_round=reducer_pb2.OpenRound(
                    run_id=message.run_id,
                    worker=message.worker,
                    session_token=message.session_token,
                    capabilities=message.capabilities,
                    block_elements=message.block_elements,
                    shared_folder=message.shared_folder,
                )
            )
        case SharedMemoryMapped():
            return reducer_pb2.ReduceRequest(
                shared_memory_mapped=reducer_pb2.SharedMemoryMapped(
                    contributions_nonce=message.contributions_nonce,
                    averages_nonce=message.averages_nonce,
                )
            )
        case BlockGradient():
            answer = message.answer_encoding
            return reducer_pb2.ReduceRequest(
                block_gradient=reducer_pb2.BlockGradient(
                    key=key(message.key),
                    group=message.group,
                    sequence=message.sequence,
                    operation=number(message.operation),
                    rank=message.rank,
                    world_size=message.world_size,
                    block=message.block,
                    element_offset=message.offset,
                    element_count=message.count,
                    weight=message.weight,
                    encoding=number(message.encoding),
                    answer_encoding=number(answer) if answer else None,
                    **content(message, padding),
                )
            )
        case Abstain():
            return reducer_pb2.ReduceRequest(
                abstain=reducer_pb2.Abstain(
                    key=key(message.key),
                    group=message.group,
                    sequence=message.sequence,
                    rank=message.rank,
                    world_size=message.world_size,
                )
            )


def response(message: Response, padding: bytes = b"") -> reducer_pb2.ReduceResponse:
    match message:
        case RoundOpened():
            return reducer_pb2.ReduceResponse(
                round_opened=reducer_pb2.RoundOpened(
                    capabilities=message.capabilities,
                    max_payload_bytes=message.max_payload_bytes,
                    contributions=offer(message.contributions),
                    averages=offer(message.averages),
                    shared_memory_refused=message.shared_memory_refused,
                    tcp=tcp_offer(message.tcp),
                )
            )
        case AveragedBlock():
            return reducer_pb2.ReduceResponse(
                averaged_block=reducer_pb2.AveragedBlock(
                    key=key(message.key),
                    group=message.group,
                    sequence=message.sequence,
                    operation=number(message.operation),
                    contributors=message.contributors,
                    world_size=message.world_size,
                    block=message.block,
                    element_offset=message.offset,
                    element_count=message.count,
                    total_weight=message.total_weight,
                    encoding=number(message.encoding),
                    **content(message, padding),
                )
            )
        case BlockFault():
            return reducer_pb2.ReduceResponse(
                block_fault=reducer_pb2.BlockFault(
                    key=key(message.key),
                    group=message.group,
                    sequence=message.sequence,
                    kind=number(message.kind),
                    rank=message.rank,
                    block=message.block,
                    element=message.element,
                    value=message.value,
                    message=message.message,
                )
            )
        case StaleRound():
            return reducer_pb2.ReduceResponse(
                stale_round=reducer_pb2.StaleRound(
                    key=key(message.key), greatest=key(message.greatest)
                )
            )
        case RoundAborted():
            return reducer_pb2.ReduceResponse(
                round_aborted=reducer_pb2.RoundAborted(
                    key=key(message.key),
                    message=message.message,
                    corrupt=corrupt_chunk(message.corrupt),
                )
            )
