"""Conversion: the contract's plain values to protobuf messages, and back with every rule checked.

Each `x_to_proto` takes a plain value. If the value may be missing, it takes None, too, and returns
None, which a generated constructor leaves out. Each `x_from_proto` returns the plain value, or
raises WireError. Protobuf's accessors can't tell an absent message from an empty one:
`optional_key_from_proto` returns None for both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.arithmetic import check as check_arithmetic
from andon.protocol.attestations import (
    Attestation,
    ElementApart,
    MeanCheck,
    NodeApart,
    NodeOwner,
)
from andon.protocol.encoding import Encoding
from andon.protocol.grains import Node, NodeLoss
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.limits import (
    MAX_DIMENSIONS,
    MAX_OWED_RANGES,
    MAX_PAYLOAD_BYTES,
    LimitExceeded,
    require_at_most,
)
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, MeanKind, Policy, RunPlan, Topology
from andon.protocol.schedules import AVERAGING, OuterOptimizer
from andon.protocol.sparse import KEPT
from andon.v1 import coordinator_pb2, halt_pb2, record_pb2

__all__ = [
    "WireError",
    "arithmetic_from_proto",
    "arithmetic_to_proto",
    "attestations_from_proto",
    "attestations_to_proto",
    "cursor_from_proto",
    "cursor_to_proto",
    "enum_from_proto",
    "enum_to_proto",
    "evidence_from_proto",
    "evidence_to_proto",
    "key_from_proto",
    "key_to_proto",
    "liveness_from_proto",
    "liveness_to_proto",
    "mean_check_from_proto",
    "mean_check_to_proto",
    "node_losses_from_proto",
    "node_losses_to_proto",
    "nodes_apart_from_proto",
    "nodes_apart_to_proto",
    "optional_enum_from_proto",
    "optional_evidence_from_proto",
    "optional_key_from_proto",
    "plan_from_proto",
    "plan_to_proto",
    "policy_from_proto",
    "policy_to_proto",
    "range_from_proto",
    "range_to_proto",
    "reading",
    "record_from_proto",
    "record_to_proto",
    "shares_from_proto",
    "shares_to_proto",
    "sums_from_proto",
    "sums_to_proto",
]

_Member = TypeVar("_Member", bound=enum.Enum)


class WireError(ValueError):
    """A message from a peer is well-formed, but illegal."""


class reading:  # noqa: N801  # used like a function; a generator would cost as much as the read
    """Names the message in the error of an illegal value."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        """Reads `message` in the block."""
        self._message = message

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raises WireError in place of another ValueError."""
        # Those from a message inside are named already.
        if isinstance(error, ValueError) and not isinstance(error, WireError | LimitExceeded):
            raise WireError(f"{self._message.DESCRIPTOR.name}: {error}") from None


def enum_from_proto(members: type[_Member], number: int) -> _Member:
    """The member of a Python enum with the generated enum's number; WireError if there is none."""
    try:
        return members(number)
    except ValueError:
        raise WireError(f"{number} is no {members.__name__}") from None


def enum_to_proto(member: enum.Enum | None) -> Any:
    """The generated enum's number of a Python enum's member; 0, unspecified, for None.

    The type is Any: each generated enum has a type of its own in the stubs, and is a number at run
    time.
    """
    return 0 if member is None else member.value


def optional_enum_from_proto(members: type[_Member], number: int) -> _Member | None:
    """As `enum_from_proto`, with None for the number 0, unspecified."""
    return enum_from_proto(members, number) if number else None


def key_to_proto(key: Key | None) -> record_pb2.Key | None:
    """A key; None for None."""
    return None if key is None else record_pb2.Key(term=key.term, round=key.round)


def key_from_proto(message: record_pb2.Key) -> Key:
    """A key that must be present.

    Raises:
        WireError: it is absent, or its term is 0.
    """
    try:
        return Key(message.term, message.round)
    except ValueError as error:
        raise WireError(f"Key: {error}") from None


def optional_key_from_proto(message: record_pb2.Key) -> Key | None:
    """A key that may be absent: None if it is, or if it is empty."""
    return key_from_proto(message) if message.term or message.round else None


def cursor_to_proto(cursor: Cursor) -> record_pb2.Cursor:
    """A cursor."""
    owed = map(range_to_proto, cursor.owed)
    return record_pb2.Cursor(epoch=cursor.epoch, position=cursor.position, owed=owed)


def cursor_from_proto(message: record_pb2.Cursor) -> Cursor:
    """A cursor; the start of epoch 0 if it is absent.

    Raises:
        WireError: its owed ranges do not rise, or are not before its position.
        LimitExceeded: they are too many.
    """
    require_at_most(len(message.owed), MAX_OWED_RANGES, "ranges of owed positions")
    with reading(message):
        return Cursor(message.epoch, message.position, tuple(map(range_from_proto, message.owed)))


def range_to_proto(positions: PositionRange) -> record_pb2.PositionRange:
    """A range of positions."""
    return record_pb2.PositionRange(start=positions.start, stop=positions.stop)


def range_from_proto(message: record_pb2.PositionRange) -> PositionRange:
    """A range of positions.

    Raises:
        WireError: it ends before it starts.
    """
    with reading(message):
        return PositionRange(message.start, message.stop)


def record_to_proto(record: Record) -> record_pb2.Record:
    """A record."""
    return record_pb2.Record(
        key=key_to_proto(record.key),
        parent=key_to_proto(record.parent),
        kind=enum_to_proto(record.kind),
        step=record.step,
        cursor=cursor_to_proto(record.cursor),
        roster=record.roster,
    )


def record_from_proto(message: record_pb2.Record) -> Record:
    """A record.

    Raises:
        WireError: no key, an unknown kind, or a parent that does not come before it.
    """
    with reading(message):
        return Record(
            key=key_from_proto(message.key),
            parent=optional_key_from_proto(message.parent),
            kind=enum_from_proto(RecordKind, message.kind),
            step=message.step,
            cursor=cursor_from_proto(message.cursor),
            roster=tuple(message.roster),
        )


def evidence_to_proto(evidence: HaltEvidence | None) -> halt_pb2.HaltEvidence | None:
    """A halt's evidence; None for None."""
    if evidence is None:
        return None
    return halt_pb2.HaltEvidence(
        id=evidence.id,
        reason=enum_to_proto(evidence.reason),
        key=key_to_proto(evidence.key),
        step=evidence.step,
        worker=evidence.worker,
        block=evidence.block,
        parameter=evidence.parameter,
        element=evidence.element,
        value=evidence.value,
        message=evidence.message,
        at_unix_s=evidence.at_unix_s,
        epoch=evidence.epoch,
        positions=None if evidence.positions is None else range_to_proto(evidence.positions),
        reported_by=evidence.reported_by,
    )


def evidence_from_proto(message: halt_pb2.HaltEvidence) -> HaltEvidence:
    """A halt's evidence. An unknown reason becomes a protocol violation that names its number.

    Raises:
        WireError: no id, or no reason.
        LimitExceeded: the element has too many dimensions.
    """
    require_at_most(len(message.element), MAX_DIMENSIONS, "dimensions of an element")
    with reading(message):
        if not message.id:
            raise WireError("HaltEvidence: it has no id")
        reason, text = HaltReason.PROTOCOL_VIOLATION, message.message
        if message.reason in {known.value for known in HaltReason} | {0}:
            reason = enum_from_proto(HaltReason, message.reason)
        else:
            # The contract: an unknown reason MUST be treated as a halt.
            text = f"halt reason {message.reason}, unknown to this version: {text}"
        return HaltEvidence(
            id=message.id,
            reason=reason,
            step=message.step,
            key=optional_key_from_proto(message.key),
            worker=message.worker if message.HasField("worker") else None,
            block=message.block if message.HasField("block") else None,
            parameter=message.parameter,
            element=tuple(message.element),
            value=message.value,
            message=text,
            at_unix_s=message.at_unix_s,
            epoch=message.epoch if message.HasField("epoch") else None,
            positions=(
                range_from_proto(message.positions) if message.HasField("positions") else None
            ),
            reported_by=message.reported_by if message.HasField("reported_by") else None,
        )


def optional_evidence_from_proto(message: halt_pb2.HaltEvidence) -> HaltEvidence | None:
    """A halt that may be absent: None if it is, or if it is empty."""
    return evidence_from_proto(message) if message.id or message.reason else None


def plan_to_proto(plan: RunPlan) -> coordinator_pb2.RunPlan:
    """A run's plan."""
    return coordinator_pb2.RunPlan(
        dataset_size=plan.dataset_size,
        global_batch=plan.global_batch,
        seed=plan.seed,
        total_steps=plan.total_steps,
        total_epochs=plan.total_epochs,
        data_digest=bytes.fromhex(plan.data_digest),
        drop_last=plan.drop_last,
        sparse=plan.sparse,
        grain=plan.grain,
        tree=plan.tree,
    )


def plan_from_proto(message: coordinator_pb2.RunPlan) -> RunPlan:
    """A run's plan.

    Raises:
        WireError: no samples in a step, or in the training set.
    """
    with reading(message):
        return RunPlan(
            global_batch=message.global_batch,
            dataset_size=message.dataset_size if message.HasField("dataset_size") else None,
            seed=message.seed,
            total_steps=message.total_steps if message.HasField("total_steps") else None,
            total_epochs=message.total_epochs if message.HasField("total_epochs") else None,
            data_digest=message.data_digest.hex(),
            drop_last=message.drop_last,
            sparse=message.sparse,
            grain=message.grain,
            tree=message.tree,
        )


def policy_to_proto(policy: Policy) -> coordinator_pb2.Policy:
    """The line's policy."""
    return coordinator_pb2.Policy(
        chunk_elements=policy.chunk_elements,
        encoding=enum_to_proto(policy.encoding),
        answer_encoding=enum_to_proto(policy.answer_encoding),
        digest_every=policy.digest_every,
        max_steps=policy.max_steps,
        gradient_norm=policy.gradient_norm,
        topology=enum_to_proto(policy.topology),
        local_steps=policy.local_steps,
        outer=None if policy.outer == AVERAGING else _outer_to_proto(policy.outer),
        overlap=policy.overlap,
        overlap_steps=policy.overlap_steps,
        max_grad_norm=policy.max_grad_norm,
        own_gradient_norm=policy.own_gradient_norm,
        average_buffers=policy.average_buffers,
        quorum=policy.quorum or 0.0,
        max_late=policy.max_late if policy.quorum else 0,
        fragments=policy.fragments if policy.in_fragments else 0,
        mix=policy.mix,
        topk_kept=0 if policy.topk_kept == KEPT else policy.topk_kept,
        mean=enum_to_proto(policy.mean) if policy.trims else None,
    )


def _outer_to_proto(outer: OuterOptimizer) -> coordinator_pb2.OuterOptimizer:
    return coordinator_pb2.OuterOptimizer(
        learning_rate=outer.learning_rate, momentum=outer.momentum
    )


def policy_from_proto(message: coordinator_pb2.Policy) -> Policy:
    """The line's policy.

    Raises:
        WireError: an unknown encoding, chunks of no elements or beyond the limit of a payload, or
            settings that contradict each other.
    """
    with reading(message):
        policy = Policy(
            chunk_elements=message.chunk_elements,
            encoding=enum_from_proto(Encoding, message.encoding),
            answer_encoding=optional_enum_from_proto(Encoding, message.answer_encoding),
            digest_every=message.digest_every,
            max_steps=message.max_steps if message.HasField("max_steps") else None,
            gradient_norm=message.gradient_norm,
            topology=optional_enum_from_proto(Topology, message.topology) or Topology.STAR,
            local_steps=message.local_steps,
            outer=(
                OuterOptimizer(message.outer.learning_rate, message.outer.momentum)
                if message.HasField("outer")
                else AVERAGING
            ),
            overlap=message.overlap,
            overlap_steps=message.overlap_steps,
            max_grad_norm=message.max_grad_norm or None,
            own_gradient_norm=message.own_gradient_norm,
            average_buffers=message.average_buffers,
            quorum=message.quorum or None,
            **({"max_late": message.max_late} if message.quorum else {}),
            fragments=message.fragments or 1,
            mix=message.mix,
            topk_kept=message.topk_kept or KEPT,
            mean=optional_enum_from_proto(MeanKind, message.mean) or MeanKind.WEIGHTED,
        )
        # Averages may have a wider encoding than contributions, and must fit a message, too.
        chunk_bytes = max(each.payload_bytes(policy.chunk_elements) for each in policy.encodings)
        if chunk_bytes > MAX_PAYLOAD_BYTES:
            raise WireError(f"Policy: chunks of {chunk_bytes} bytes, above {MAX_PAYLOAD_BYTES}")
        return policy


def node_losses_to_proto(losses: Iterable[NodeLoss]) -> list[coordinator_pb2.NodeLoss]:
    """What nodes add to a step's loss."""
    return [
        coordinator_pb2.NodeLoss(
            first=each.node.first,
            grains=len(each.node),
            weight=each.weight,
            loss_sum=each.loss_sum,
        )
        for each in losses
    ]


def node_losses_from_proto(messages: Iterable[coordinator_pb2.NodeLoss]) -> tuple[NodeLoss, ...]:
    """What nodes add to a step's loss. Whether they are those of a share is checked elsewhere.

    Raises:
        WireError: a node without grains.
    """
    losses = []
    for message in messages:
        with reading(message):
            node = Node(message.first, message.first + message.grains)
            losses.append(NodeLoss(node, message.weight, message.loss_sum))
    return tuple(losses)


def attestations_to_proto(
    attested: Iterable[Attestation],
) -> list[coordinator_pb2.Attestation]:
    """What a worker has computed."""
    return [
        coordinator_pb2.Attestation(
            first=each.node.first,
            grains=len(each.node),
            digest=each.digest,
            samples=each.samples,
            components=each.components,
        )
        for each in attested
    ]


def attestations_from_proto(
    messages: Iterable[coordinator_pb2.Attestation],
) -> tuple[Attestation, ...]:
    """What a worker has computed. Whether it was asked for that is checked elsewhere.

    Raises:
        WireError: a node without grains, or hashes of another length than theirs.
    """
    attested = []
    for message in messages:
        with reading(message):
            attested.append(
                Attestation(
                    node=Node(message.first, message.first + message.grains),
                    digest=message.digest,
                    samples=message.samples,
                    components=message.components,
                )
            )
    return tuple(attested)


def sums_to_proto(sums: Iterable[NodeOwner]) -> list[coordinator_pb2.NodeOwner]:
    """The nodes of all shares, and who contributes them."""
    return [
        coordinator_pb2.NodeOwner(
            first=each.node.first, grains=len(each.node), rank=each.rank, relayed=each.relayed
        )
        for each in sums
    ]


def sums_from_proto(messages: Iterable[coordinator_pb2.NodeOwner]) -> tuple[NodeOwner, ...]:
    """The nodes of all shares, and who contributes them.

    Raises:
        ValueError: a node without grains, or one that does not begin where the last one ends.
    """
    sums, stop = [], 0
    for each in messages:
        if each.first != stop:
            raise ValueError(
                f"sums of grains up to {stop} are followed by one from {each.first} on"
            )
        stop += each.grains
        node = Node(each.first, stop)
        sums.append(NodeOwner(node=node, rank=each.rank, relayed=each.relayed))
    return tuple(sums)


def mean_check_to_proto(check: MeanCheck | None) -> coordinator_pb2.MeanCheck | None:
    """The mean that a worker made by itself; None stays None."""
    if check is None:
        return None
    message = coordinator_pb2.MeanCheck(
        expected=check.expected, came=check.came, relayed=check.relayed
    )
    if check.apart is not None:
        message.apart.CopyFrom(_element_to_proto(check.apart))
    return message


def mean_check_from_proto(message: coordinator_pb2.MeanCheck) -> MeanCheck:
    """The mean that a worker made by itself.

    Raises:
        WireError: a digest of another length than it has.
    """
    with reading(message):
        return MeanCheck(
            expected=message.expected,
            came=message.came,
            relayed=tuple(message.relayed),
            apart=_element_from_proto(message.apart) if message.HasField("apart") else None,
        )


def nodes_apart_to_proto(nodes: Iterable[NodeApart]) -> list[coordinator_pb2.NodeApart]:
    """Nodes of which a worker has two results."""
    return [
        coordinator_pb2.NodeApart(
            first=each.node.first,
            grains=len(each.node),
            own=each.own,
            other=each.other,
            element=_element_to_proto(each.element),
        )
        for each in nodes
    ]


def nodes_apart_from_proto(
    messages: Iterable[coordinator_pb2.NodeApart],
) -> tuple[NodeApart, ...]:
    """Nodes of which a worker has two results.

    Raises:
        WireError: a node without grains, or a digest of another length than it has.
    """
    nodes = []
    for message in messages:
        with reading(message):
            nodes.append(
                NodeApart(
                    node=Node(message.first, message.first + message.grains),
                    own=message.own,
                    other=message.other,
                    element=_element_from_proto(message.element),
                )
            )
    return tuple(nodes)


def _element_to_proto(element: ElementApart) -> coordinator_pb2.ElementApart:
    return coordinator_pb2.ElementApart(
        block=element.block,
        element=element.element,
        expected=element.expected,
        came=element.came,
    )


def _element_from_proto(message: coordinator_pb2.ElementApart) -> ElementApart:
    return ElementApart(message.block, message.element, message.expected, message.came)


def arithmetic_to_proto(items: Arithmetic) -> list[coordinator_pb2.ArithmeticItem]:
    """What a worker states of its arithmetic."""
    return [coordinator_pb2.ArithmeticItem(name=name, value=value) for name, value in items]


def arithmetic_from_proto(messages: Iterable[coordinator_pb2.ArithmeticItem]) -> Arithmetic:
    """What a worker states of its arithmetic.

    Raises:
        WireError: names do not rise, or there is a text that can't be.
        LimitExceeded: there is too much of it.
    """
    items = tuple((each.name, each.value) for each in messages)
    try:
        check_arithmetic(items)
    except LimitExceeded:
        raise
    except ValueError as error:
        raise WireError(f"ArithmeticItem: {error}") from None
    return items


def liveness_to_proto(liveness: Liveness) -> coordinator_pb2.Liveness:
    """The liveness settings."""
    return coordinator_pb2.Liveness(
        lease_s=liveness.lease_s,
        heartbeat_s=liveness.heartbeat_s,
        reconnect_s=liveness.reconnect_s,
    )


def liveness_from_proto(message: coordinator_pb2.Liveness) -> Liveness:
    """The liveness settings.

    Raises:
        WireError: the lease is too short, or heartbeats are wanted more than three times a lease.
    """
    with reading(message):
        liveness = Liveness(lease_s=message.lease_s, reconnect_s=message.reconnect_s)
        heartbeat_s = message.heartbeat_s
        # A worker sends heartbeats three times a lease, and must not be expected to send more.
        if not heartbeat_s >= liveness.heartbeat_s * (1 - 1e-9):
            raise WireError(
                f"Liveness: heartbeat_s must be at least a third of lease_s, not "
                f"{heartbeat_s} of {liveness.lease_s}"
            )
        if heartbeat_s > liveness.heartbeat_s:
            liveness = replace(liveness, slower_s=min(heartbeat_s, liveness.lease_s))
        return liveness


def shares_to_proto(shares: Iterable[ReducerShare]) -> list[coordinator_pb2.ReducerShare]:
    """The reducers' shares."""
    return [
        coordinator_pb2.ReducerShare(
            address=share.address, start_element=share.start, stop_element=share.stop
        )
        for share in shares
    ]


def shares_from_proto(
    messages: Iterable[coordinator_pb2.ReducerShare],
) -> tuple[ReducerShare, ...]:
    """The reducers' shares. Whether they cover the model is checked where the layout is known.

    Raises:
        WireError: a share ends before it begins.
    """
    shares = []
    for message in messages:
        with reading(message):
            shares.append(
                ReducerShare(message.address, message.start_element, message.stop_element)
            )
    return tuple(shares)
