"""Handing over: the sums of a host's processes become the leader's, and so the host's.

Theory of operation. On a line of grains each process of a host adds up its own ones, like a worker,
and has the sum of each of its maximal nodes. Once the last backward of all is over they meet. The
others say which nodes they have, and which parameters have a gradient there; then they send these
sums to the leader, block by block, and keep nothing. The leader joins siblings along the tree, so
that its sums have the bits that one process would have made of all grains. What a grain made of
running statistics goes the same way, and so do sums of grains that are verified, and hashes.

A block is whole once all have sent it. So the leader gives it to the line while later ones come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from andon.protocol.grains import Node
from andon_trainer.averaging.attesting import SumHashes
from andon_trainer.averaging.grain_buffers import GrainBuffers
from andon_trainer.averaging.grain_sums import GrainSums
from andon_trainer.averaging.node_sums import NodeSums, Parts
from andon_trainer.hosts.calls import meet
from andon_trainer.hosts.group import HostGroup, Pending
from andon_trainer.model.layout import ModelPlan

__all__ = ["HandOver"]

_SUMS = "the end of line.backward"
"""What the processes call when their last backwards are over."""

_Outline = tuple[tuple[Node, tuple[bool, ...]], ...]
"""The nodes of some sums, and which of their components are present."""


@dataclass(frozen=True, slots=True)
class _Brought:
    """What a process says of the sums that it hands over."""

    outlines: tuple[_Outline, ...]
    """In the order of `HandOver._tables`."""
    hashes: tuple[SumHashes | None, SumHashes | None]
    """Of its own grains, and of those that it verified."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Some sums of one process, and what their components look like."""

    sums: NodeSums
    shapes: Sequence[torch.Size]
    devices: Sequence[torch.device]


@dataclass(frozen=True, slots=True)
class _Coming:
    """A node's sum on its way to the leader."""

    node: Node
    present: tuple[bool, ...]
    flat: torch.Tensor
    pending: Pending | None
    """None: no component is present, and nothing is sent."""


class HandOver:
    """Brings the sums of one process's grains to its host's leader. Used by one thread."""

    def __init__(
        self,
        group: HostGroup,
        plan: ModelPlan,
        sums: tuple[GrainSums, GrainSums],
        buffers: GrainBuffers,
    ) -> None:
        """Nothing is handed over yet.

        Args:
            group: the host's processes.
            plan: the blocks.
            sums: this process's own ones, and those that it verifies.
            buffers: what its grains make of running statistics.
        """
        self._group = group
        self._plan = plan
        self._sums = sums
        self._buffers = buffers
        places = {parameter.device for block in plan.parameters for parameter in block}
        one = places.pop() if group.of_devices and len(places) == 1 else None
        self._place = one or torch.device("cpu")
        """Where tensors are when they are sent."""

    def meet(self) -> list[_Brought]:
        """Says what this process has; returns what all bring, in their order.

        Raises:
            LineHalted, HostLost, ...: the leader failed meanwhile, and raises the same.
        """
        own, verified = self._sums
        outlines = tuple(_outline_of(each.sums) for each in self._tables())
        mine = _Brought(outlines, (own.hashes, verified.hashes))
        if not self._group.rank:
            mine = _Brought((), (None, None))  # Nobody needs to hear of the leader's.
        return [each.given for each in meet(self._group, _SUMS, mine)]

    def send(self) -> None:
        """Sends all to the leader, and keeps nothing of it."""
        before: list[Pending] = []
        for table in self._tables():
            flats = [self._flat_of(table.sums[node]) for node in table.sums.nodes]
            table.sums.clear()
            sent = [self._group.start_send(flat) for flat in flats if flat.numel()]
            # Two blocks at most are under way: no second copy of the model.
            for each in before:
                each.wait()
            before = sent
        for each in before:
            each.wait()
        for sums in self._sums:
            if sums.hashes is not None:
                sums.hashes.clear()

    def receive(self, brought: Sequence[_Brought]) -> Iterator[int]:
        """Takes over what the others send; yields each block once its sums are whole.

        Everything has come when it ends.
        """
        self._take_hashes(brought)
        tables = list(self._tables())
        coming = self._begin(tables, brought, 0)
        for number, table in enumerate(tables):
            now, coming = coming, self._begin(tables, brought, number + 1)
            for each in now:
                table.sums.add_node(each.node, _parts_of(each, table))
            if number < len(self._plan.parameters):
                yield number

    def _take_hashes(self, brought: Sequence[_Brought]) -> None:
        for each in brought:
            for sums, hashes in zip(self._sums, each.hashes, strict=True):
                if hashes is not None:
                    assert sums.hashes is not None, "all processes attest, or none does"
                    sums.hashes.take_over(hashes)

    def _tables(self) -> Iterator[_Table]:
        """All sums: of the blocks first, in their order."""
        own, verified = self._sums
        return itertools.chain(
            self._tables_of(own),
            [
                _Table(
                    self._buffers.sums,
                    [torch.Size([self._buffers.elements])],
                    [self._buffers.device],
                )
            ],
            self._tables_of(verified),
        )

    def _tables_of(self, sums: GrainSums) -> Iterator[_Table]:
        # Between two steps, and where nothing is verified, there are no blocks.
        for block, parameters in zip(sums.blocks, self._plan.parameters, strict=False):
            yield _Table(
                block,
                [each.shape for each in parameters],
                [each.device for each in parameters],
            )

    def _begin(
        self, tables: Sequence[_Table], brought: Sequence[_Brought], number: int
    ) -> list[_Coming]:
        """Begins to receive a table's sums, of all processes in turn."""
        if number == len(tables):
            return []
        sizes = [shape.numel() for shape in tables[number].shapes]
        coming = []
        for rank, each in enumerate(brought):
            for node, present in each.outlines[number] if rank else ():
                total = sum(itertools.compress(sizes, present))
                flat = torch.empty(total, dtype=torch.float32, device=self._place)
                pending = self._group.start_receive(rank, flat) if total else None
                coming.append(_Coming(node, present, flat, pending))
        return coming

    def _flat_of(self, parts: Parts) -> torch.Tensor:
        """The components that are present, one after another."""
        there = [part.to(self._place).reshape(-1) for part in parts if part is not None]
        return torch.cat(there) if there else torch.empty(0)


def _outline_of(sums: NodeSums) -> _Outline:
    return tuple((node, tuple(part is not None for part in sums[node])) for node in sums.nodes)


def _parts_of(coming: _Coming, table: _Table) -> Parts:
    """A node's components, as the process had them that summed it; waits for them."""
    if coming.pending is not None:
        coming.pending.wait()
    parts: Parts = []
    at = 0
    for present, shape, device in zip(coming.present, table.shapes, table.devices, strict=True):
        parts.append(None)
        if present:
            parts[-1] = coming.flat[at : at + shape.numel()].view(shape).to(device)
            at += shape.numel()
    return parts
