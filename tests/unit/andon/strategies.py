"""Hypothesis strategies for the contract's plain values."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.layout import Block, BlockKind, Component, DType, Layout
from andon.protocol.limits import BATCH_LIMIT, COUNT_LIMIT
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    BlockGradient,
    CorruptChunk,
    EnterRound,
    OpenRound,
    Operation,
    PassMessage,
    Request,
    Response,
    RingChunk,
    RingHeader,
    RingStage,
    RoundAborted,
    RoundOpened,
    SharedMemoryMapped,
    SharedMemoryOffer,
    Slice,
    StaleRound,
    TcpOffer,
    TreeNode,
)
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import Liveness, Policy, RunPlan

_EXAMPLES = os.environ.get("ANDON_EXAMPLES", "")

# The same examples each time, so that a failure is the change's; `make soak` looks further.
BOUNDED = settings(
    max_examples=int(_EXAMPLES or 60),
    deadline=None,
    derandomize=not _EXAMPLES,
    # A busy machine is no defect.
    suppress_health_check=[HealthCheck.too_slow],
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
counts = st.integers(1, COUNT_LIMIT - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\n\t"), min_size=1, max_size=12
)

keys = st.builds(Key, st.integers(1, 2**64 - 1), u64)
cursors = st.builds(Cursor, u64, u64)
ranges = st.tuples(u64, u64).map(lambda ends: PositionRange(min(ends), max(ends)))


@st.composite
def records(draw: st.DrawFn) -> Record:
    first, second = sorted(draw(st.lists(keys, min_size=2, max_size=2, unique=True)))
    return Record(
        key=second,
        parent=draw(st.sampled_from([None, first])),
        kind=draw(st.sampled_from(RecordKind)),
        step=draw(u64),
        cursor=draw(cursors),
        roster=tuple(draw(st.lists(u32, max_size=5, unique=True))),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    parts = draw(st.lists(names, max_size=6, unique=True))
    components = [
        Component(
            name,
            tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            draw(st.sampled_from(DType)),
        )
        for name in parts
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, len(parts)], strict=True))
    labels = draw(st.lists(names, min_size=len(bounds), max_size=len(bounds), unique=True))
    return Layout(
        tuple(
            Block(draw(st.sampled_from(BlockKind)), label, tuple(components[start:stop]))
            for label, (start, stop) in zip(labels, bounds, strict=True)
        )
    )


evidences = st.builds(
    HaltEvidence,
    id=st.integers(1, 2**64 - 1),
    reason=st.sampled_from(HaltReason),
    step=u64,
    key=st.none() | keys,
    worker=st.none() | u32,
    block=st.none() | u32,
    parameter=texts,
    element=st.lists(u64, max_size=4).map(tuple),
    value=texts,
    message=texts,
    at_unix_s=finite,
)


def _plans(**known: Any) -> st.SearchStrategy[RunPlan]:
    grain = {"grain": batches, "tree": st.integers(1, 2**32 - 1)}
    return _plans_with(**known) | _plans_with(**known, **grain)


def _plans_with(**known: Any) -> st.SearchStrategy[RunPlan]:
    return st.builds(
        RunPlan,
        **known,
        seed=u64,
        total_steps=st.none() | st.integers(0, COUNT_LIMIT - 1),
        total_epochs=st.none() | st.integers(0, COUNT_LIMIT - 1),
        data_digest=st.just("") | st.binary(min_size=32, max_size=32).map(bytes.hex),
        sparse=st.booleans(),
    )


batches = st.integers(1, BATCH_LIMIT - 1)
plans = _plans(global_batch=batches, dataset_size=st.none() | counts) | batches.flatmap(
    lambda batch: _plans(
        global_batch=st.just(batch),
        dataset_size=st.integers(batch, COUNT_LIMIT - 1),
        drop_last=st.just(True),
    )
)
policies = st.builds(
    Policy,
    chunk_elements=st.integers(1, 2**18),
    encoding=st.sampled_from([each for each in Encoding if each is not Encoding.INT2_BLOCK]),
    answer_encoding=st.none() | st.sampled_from(list(Encoding)[:9]),
    digest_every=u32,
    max_steps=st.none() | counts,
    gradient_norm=st.booleans(),
    topk_kept=st.integers(1, 64),
)
livenesses = st.builds(Liveness, lease_s=st.floats(0.1, 1e6), reconnect_s=st.floats(0, 1e9))


@st.composite
def payloads(draw: st.DrawFn) -> tuple[Encoding, int, memoryview]:
    """An encoding, a count and as many elements of arbitrary bytes, NaN and infinities too."""
    encoding = draw(st.sampled_from(Encoding))
    count = draw(st.integers(0, 40))
    size = encoding.payload_bytes(count)
    return encoding, count, memoryview(draw(st.binary(min_size=size, max_size=size)))


@st.composite
def contents(draw: st.DrawFn) -> tuple[Encoding, int, memoryview, Slice | None]:
    """An encoding, a count and that many elements: bytes, or a slice of shared memory."""
    encoding, count, payload = draw(payloads())
    if draw(st.booleans()):
        return encoding, count, payload, None
    where = Slice(draw(u64), encoding.payload_bytes(count), draw(u64))
    return encoding, count, memoryview(b""), where


@st.composite
def nodes(draw: st.DrawFn) -> TreeNode:
    first, grains, after = (
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 2**30)),
        draw(st.integers(0, 2**30)),
    )
    return TreeNode(first, grains, first + grains + after, draw(st.integers(1, 2**32 - 1)))


@st.composite
def gradients(draw: st.DrawFn) -> BlockGradient:
    encoding, count, payload, where = draw(contents())
    return BlockGradient(
        key=draw(keys),
        rank=draw(u32),
        world_size=draw(u32),
        block=draw(u32),
        offset=draw(u64),
        count=count,
        weight=draw(finite),
        payload=payload,
        slice=where,
        encoding=encoding,
        answer_encoding=draw(st.none() | st.sampled_from(Encoding)),
        group=draw(u32),
        sequence=draw(u32),
        operation=draw(st.sampled_from(Operation)),
        node=draw(st.none() | nodes()),
    )


@st.composite
def averages(draw: st.DrawFn) -> AveragedBlock:
    encoding, count, payload, where = draw(contents())
    return AveragedBlock(
        key=draw(keys),
        block=draw(u32),
        offset=draw(u64),
        count=count,
        total_weight=draw(finite),
        contributors=draw(u32),
        world_size=draw(u32),
        payload=payload,
        slice=where,
        encoding=encoding,
        group=draw(u32),
        sequence=draw(u32),
        operation=draw(st.sampled_from(Operation)),
    )


capabilities = st.lists(texts, max_size=3).map(tuple)
offers = st.builds(SharedMemoryOffer, texts, u64, u64)
tcp_offers = st.builds(TcpOffer, u32, st.binary(max_size=32), st.booleans())
requests: st.SearchStrategy[Request] = st.one_of(
    gradients(),
    st.builds(
        OpenRound,
        texts,
        u32,
        st.binary(max_size=40),
        capabilities,
        st.lists(u64, max_size=5).map(tuple),
        st.binary(max_size=16),
        st.booleans(),
        u32,
    ),
    st.builds(SharedMemoryMapped, st.binary(max_size=16), st.binary(max_size=16)),
    st.builds(Abstain, key=keys, rank=u32, world_size=u32, group=u32, sequence=u32),
)
responses: st.SearchStrategy[Response] = st.one_of(
    averages(),
    st.builds(
        RoundOpened,
        capabilities,
        u32,
        st.none() | offers,
        st.none() | offers,
        texts,
        st.none() | tcp_offers,
    ),
    st.builds(
        BlockFault,
        key=keys,
        kind=st.sampled_from(BlockFaultKind),
        block=u32,
        element=u64,
        message=texts,
        rank=st.none() | u32,
        value=texts,
        group=u32,
        sequence=u32,
    ),
    st.builds(StaleRound, keys, keys),
    st.builds(RoundAborted, keys, texts, st.none() | st.builds(CorruptChunk, u32, u32, u64)),
)


@st.composite
def ring_chunks(draw: st.DrawFn) -> RingChunk:
    encoding, count, payload = draw(payloads().filter(lambda drawn: drawn[1] > 0))
    return RingChunk(
        key=draw(keys),
        stage=draw(st.sampled_from(RingStage)),
        block=draw(u32),
        offset=draw(u64),
        count=count,
        payload=payload,
        encoding=encoding,
        sequence=draw(u32),
    )


passes: st.SearchStrategy[PassMessage] = st.one_of(
    st.builds(EnterRound, key=keys, rank=u32, world_size=u32, token=st.binary(max_size=40)),
    st.builds(
        RingHeader,
        key=keys,
        rank=u32,
        weight=st.floats(allow_nan=False),
        sequence=u32,
        operation=st.none() | st.sampled_from(Operation),
        first_block=u32,
        stop_block=u32,
        data_bytes=u64,
        data_head=st.binary(max_size=40),
    ),
    ring_chunks(),
)
