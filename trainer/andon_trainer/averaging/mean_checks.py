"""The reducers' sums, made again: a worker's own mean of all nodes, beside the one that came.

Theory of operation. In a verified round each worker makes the mean by itself. It has some nodes: it
has computed them, or verified their grains. Those that somebody lacks are relayed: once the
averages are here, their owner sends each of them again, in an exchange in which all others abstain,
so that the reducer has nothing to add. What came so is hashed, and the coordinator compares the
hash with what the owner attested; so a mean counts for something only if it was made of sums that
are known to be right.

A node that came may be one that this worker has made as well, since it verifies the owner's grains.
If the two hashes differ, both vectors are here, and the first element that differs is noted: so
people learn where in the model a wrong result is.

Nodes come in rising order, and siblings are joined as soon as both are here. So there are as many
vectors of the model's size as the tree is deep, at most. docs/protocol-same-bits.md, section 37.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from andon.protocol.attestations import ElementApart, MeanCheck, NodeApart, NodeOwner
from andon.protocol.grains import Grains, Node, children, is_node, root_divisor
from andon_trainer.averaging.attesting import component_hash, digest_of
from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.grain_sums import GrainSums, NodeStaging
from andon_trainer.core.calls import Call, Floats
from andon_trainer.model.layout import ModelPlan

__all__ = ["MeanChecks", "element_apart", "pieces_of"]

_NAME = "sums to verify"
_MISSING = np.float32(-0.0).tobytes()


class MeanChecks:
    """Makes the mean of a round's nodes. Used by one thread."""

    def __init__(
        self,
        averaging: Averaging,
        plan: ModelPlan,
        sums: tuple[GrainSums, GrainSums],
        staging: NodeStaging,
    ) -> None:
        """Checks nothing yet.

        Args:
            averaging: makes the round's exchanges.
            plan: the blocks.
            sums: this worker's own ones, and those that it verifies.
            staging: has the vectors of its own ones, as they were sent.
        """
        self._averaging = averaging
        self._plan = plan
        self._sizes = [[part.numel() for part in block] for block in plan.parameters]
        self._sums = sums
        self._staging = staging
        self._came: list[Floats] = []
        self._joined: list[tuple[Node, list[Floats]]] = []
        """Nodes that wait for their siblings, with a vector for each block."""
        self._relayed: list[bytes] = []
        self.apart: list[NodeApart] = []
        """Nodes that came, and of which this worker has made something else."""

    @property
    def relays(self) -> bool:
        """Whether the present round has exchanges of nodes."""
        return any(each.relayed for each in self._assigned)

    def begin(self, came: Sequence[Floats]) -> None:
        """The averages came; they are copied, if they are to be checked."""
        self.drop()
        self.apart = []
        if self._assigned and not self._only_attends:
            self._came = [each.copy() for each in came]

    def relay(self, *, last: bool) -> bool:
        """Makes the exchanges of nodes, and adds all up; False if the round is void.

        `last`: no other exchange of the round follows.
        """
        if not self._only_attends:
            self._sums[1].hash_nodes()
        left = sum(each.relayed for each in self._assigned)
        for each in self._assigned:
            left -= each.relayed
            vectors = self._receive(each, last=last and not left) if each.relayed else []
            if vectors is None:
                self.drop()
                return False
            if self._only_attends:
                continue
            if each.relayed:
                self._relayed.append(self._digest(vectors))
                self._compare(each.node, vectors)
            self._join(each.node, vectors or self._own(each.node))
        return True

    def finish(self, grains: Grains, total_weight: float) -> MeanCheck | None:
        """What this worker says of the averages; None if nobody asked.

        Args:
            grains: of the batch.
            total_weight: that of the averages.
        """
        if not self._assigned or self._only_attends:
            return None
        if not self.relays:
            self.relay(last=True)
        ((root, vectors),) = self._joined
        assert root == grains.root, "the nodes that were assigned are the batch"
        with np.errstate(all="ignore"):
            for vector in vectors:
                if total_weight:
                    vector /= root_divisor(total_weight, grains.micro_batch, grains.count)
                else:
                    vector[:] = 0  # The reducers have nothing to divide by.
        expected, came = _digest_of(vectors), _digest_of(self._came)
        check = MeanCheck(
            expected=expected,
            came=came,
            relayed=tuple(self._relayed),
            apart=element_apart(vectors, self._came) if expected != came else None,
        )
        self._joined, self._relayed = [], []
        return check

    def compare_written(self, hashes: Sequence[bytes], root: Node) -> None:
        """Compares what is in `p.grad` with what came, where the one is a copy of the other.

        Args:
            hashes: those of all components of `p.grad`, in the layout's order.
            root: of the batch.
        """
        came, self._came = self._came, []
        if not came:
            return
        parameters = [each for block in self._plan.parameters for each in block]
        pieces = pieces_of(came, self._sizes)
        right = [
            component_hash(piece) if parameter.dtype is torch.float32 else written
            for piece, parameter, written in zip(pieces, parameters, hashes, strict=True)
        ]
        if right == list(hashes):
            return
        written = [
            np.concatenate([_flat_of(each.grad, each.numel()) for each in block])
            for block in self._plan.parameters
        ]
        element = element_apart(written, came)
        if element is not None:
            own, other = digest_of(hashes), digest_of(right)
            self.apart.append(NodeApart(node=root, own=own, other=other, element=element))

    def drop(self) -> None:
        """Lets the memory go: the check is over, or the round void."""
        self._came, self._joined, self._relayed = [], [], []

    @property
    def _only_attends(self) -> bool:
        """Whether this worker makes the exchanges, and is asked for nothing."""
        assigned = self._averaging.member.position.assigned
        return assigned is not None and assigned.attends

    @property
    def _assigned(self) -> tuple[NodeOwner, ...]:
        assigned = self._averaging.member.position.assigned
        return () if assigned is None else assigned.sums

    def _receive(self, node: NodeOwner, *, last: bool) -> list[Floats] | None:
        call = Call(name=_NAME, blocks=range(len(self._sizes)), exact=True)
        mine = node.rank == self._averaging.rank
        opened = self._averaging.open(float(mine), call)
        if opened is None:
            return None
        if mine:
            number = self._sums[0].nodes.index(node.node)
            for block in call.blocks:
                opened.submit_numbers(block, self._staging.flats(block)[number].numpy())
        averages = opened.finish(last=last)
        return None if averages is None else [each.copy() for each in averages.blocks]

    def _own(self, node: Node) -> list[Floats]:
        """A node that this worker has computed or verified."""
        return self._vectors(next(each for each in self._sums if node in each.nodes), node)

    def _vectors(self, sums: GrainSums, node: Node) -> list[Floats]:
        return [sums.flat(block, node) for block in range(len(self._sizes))]

    def _compare(self, node: Node, came: Sequence[Floats]) -> None:
        """Notes where a node that came last is not what this worker has made of it."""
        for sums in self._sums:
            own, other = sums.digest(node), self._relayed[-1]
            if own in (b"", other):
                continue
            element = element_apart(self._vectors(sums, node), came)
            if element is not None:  # Else what was sent has changed, and not the sum.
                self.apart.append(NodeApart(node=node, own=own, other=other, element=element))

    def _digest(self, vectors: Sequence[Floats]) -> bytes:
        """The digest of a node that came, as its owner attests it."""
        return digest_of(map(component_hash, pieces_of(vectors, self._sizes)))

    def _join(self, node: Node, vectors: list[Floats]) -> None:
        """Adds a node to its left sibling, if that is here, and their parent in turn."""
        count = self._assigned[-1].node.stop
        while self._joined:
            left, sums = self._joined[-1]
            parent = Node(left.first, node.stop)
            if not is_node(parent, count) or children(parent) != (left, node):
                break
            self._joined.pop()
            with np.errstate(all="ignore"):
                for one, other in zip(sums, vectors, strict=True):
                    np.add(one, other, out=one)
            node, vectors = parent, sums
        self._joined.append((node, vectors))


def pieces_of(
    vectors: Sequence[Floats], sizes: Sequence[Sequence[int]]
) -> Iterator[torch.Tensor | None]:
    """The components of all blocks as they travel; None: absent.

    Args:
        vectors: of each block.
        sizes: of each block's components.
    """
    for vector, each in zip(vectors, sizes, strict=True):
        for piece in torch.split(torch.from_numpy(vector), list(each)):
            yield None if piece[:1].numpy().tobytes() == _MISSING else piece


def _flat_of(gradient: torch.Tensor | None, size: int) -> Floats:
    if gradient is None:
        return np.full(size, -0.0, np.float32)
    flat: Floats = gradient.detach().float().cpu().contiguous().numpy().reshape(-1)
    return flat


def _digest_of(blocks: Sequence[Floats]) -> bytes:
    return digest_of(component_hash(torch.from_numpy(each)) for each in blocks)


def element_apart(expected: Sequence[Floats], came: Sequence[Floats]) -> ElementApart | None:
    """The first element whose bits differ, of vectors for each block; None: there is none."""
    for block, (one, other) in enumerate(zip(expected, came, strict=True)):
        differ = np.flatnonzero(one.view(np.uint32) != other.view(np.uint32))
        if differ.size:
            at = int(differ[0])
            return ElementApart(block, at, float(one[at]), float(other[at]))
    return None
