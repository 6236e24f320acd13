"""Error feedback: what a narrow encoding loses of one gradient is sent with the next.

Theory of operation. Under int8, int4 and int2 an element that is small beside the greatest of its
strip is sent as zero, and under topk all but a few are. If that happens in each step, such an
element never arrives. So the worker keeps what the encoding lost, the *residual* e, and adds it to
its next gradient g:

    u = g + e            what is encoded
    Q(u)                 what is sent
    e' = u - Q(u)        the next residual, if the step is committed

A step may be tried several times, so e' only takes e's place at the commit. Until then it is a
candidate: a void round leaves e as it was, and the same gradient is sent again bit for bit. A step
that moves no weights, since scaled gradients overflowed, leaves e as it was, too. So does a step to
which this worker gives nothing.

The gradient is not touched. It is kept after a void round, and may be recalled into `p.grad` for
more to be added, so a residual in it would be added twice. Its norm is limited, and reported,
before the residual is added.

Residuals are this worker's own. They are in no digest, no checkpoint and no transfer, and are zero
after a join, a resume, and whenever this worker gets the line's state. They are of elements, so a
new map of reducers leaves them as they are.

Threads. The training thread (or autograd's, inside backward) makes u in a vector that nobody else
has. Threads of the exchange turn it into e', chunk by chunk, as they encode it. When all averages
are here, each of this worker's elements has been encoded, so the commit finds e' whole. After a
void round these threads may still write, so its vectors are never used again.

Source: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from andon.protocol.layout import Layout
from andon.protocol.run_settings import Policy
from andon_trainer.core.calls import Floats
from andon_trainer.exchange.path import Exchange
from andon_trainer.place.position import Position

__all__ = ["ErrorFeedback", "FeedbackMember", "Residuals"]

_NO_GRADIENT_BITS = 0x80000000  # -0.0 in float32: see `gradients.missing`.


class FeedbackMember(Protocol):
    """What error feedback asks of a worker's place on the line."""

    @property
    def policy(self) -> Policy:
        """How the line works."""

    @property
    def exchange(self) -> Exchange:
        """What carries its rounds."""

    @property
    def position(self) -> Position:
        """Where the worker stands."""


class ErrorFeedback:
    """Sends one worker's blocks, with what the encoding lost of them before. Used by one thread.

    If the line's encoding is not a narrow one, blocks are sent as they are.
    """

    def __init__(self, member: FeedbackMember, layout: Layout) -> None:
        """All residuals are zero."""
        self._member = member
        self._residuals = Residuals(layout)
        self._installed = member.position.installed_from

    def begin(self) -> None:
        """An attempt begins: what was sent in the one before, if it was not committed, is void."""
        self._residuals.discard()
        installed = self._member.position.installed_from
        if installed is not self._installed:
            # The weights are others than those that the residuals were computed for.
            self._installed = installed
            self._residuals.reset()

    def submit(self, block: int, flat: Floats) -> None:
        """Checks and sends a block's gradients; `flat` must not change until the round is over."""
        exchange = self._member.exchange
        if self._member.policy.encoding.loses_much:
            exchange.submit(block, self._residuals.add(block, flat), keeps_loss=True)
        else:
            exchange.submit(block, flat)

    def committed(self, *, moves_weights: bool = True) -> None:
        """The step is committed; if it moves no weights, its gradients came to nothing."""
        if moves_weights:
            self._residuals.commit()
        else:
            self._residuals.discard()


@dataclass(slots=True)
class _Candidate:
    """A block as it was sent in the present attempt."""

    vector: Floats
    """First the numbers to send; then, element by element, what the encoding lost of them."""
    waiting: list[tuple[slice, Floats | None]]
    """The parameters without a gradient, and their residuals, which stay; None: zero."""

    def settle(self) -> Floats:
        """The residuals that follow from it."""
        for place, before in self.waiting:
            self.vector[place] = 0.0 if before is None else before
        return self.vector


class Residuals:
    """What the encoding lost of one worker's elements. Used by one thread at a time."""

    def __init__(self, layout: Layout) -> None:
        """All are zero; memory is allocated when a block is first sent."""
        self._places = [
            list(pairwise(accumulate((part.elements for part in block.components), initial=0)))
            for block in layout.blocks
        ]
        self._residuals: dict[int, Floats] = {}
        """By block, as of the last commit; none: zero."""
        self._candidates: dict[int, _Candidate] = {}
        self._spare: dict[int, Floats] = {}
        """Vectors that no thread of an exchange writes to."""

    def of(self, block: int) -> Floats | None:
        """A block's residuals as of the last commit, float32, shape (elements,); None: zero."""
        return self._residuals.get(block)

    def add(self, block: int, flat: Floats) -> Floats:
        """The numbers to send: a block's gradients and residuals, in a vector of their own.

        The exchange turns each element into what the encoding lost of it. A parameter without a
        gradient (-0.0 throughout) stays so, and its residual waits for its next gradient. If a
        block is exchanged again in one attempt, what was lost the first time is added.

        Args:
            block: its index in the layout.
            flat: its gradients, contiguous float32; not changed.
        """
        earlier = self._candidates.get(block)
        # All averages of an earlier exchange in this attempt have come, so each of its elements has
        # been encoded: its vector holds what was lost.
        before = self._residuals.get(block) if earlier is None else earlier.settle()
        vector = self._spare.pop(block, None)
        if vector is None:
            vector = np.empty_like(flat)
        # The exchange finds what must not be sent, and says so. A sum with +0.0 is no -0.0, which
        # only stands for a gradient that is not there, and costs room in topk.
        with np.errstate(all="ignore"):
            np.add(flat, np.float32(0) if before is None else before, out=vector)
        waiting: list[tuple[slice, Floats | None]] = []
        for place in self._without_gradient(block, flat):
            vector[place] = flat[place]
            waiting.append((place, None if before is None else before[place]))
        self._candidates[block] = _Candidate(vector, waiting)
        return vector

    def _without_gradient(self, block: int, flat: Floats) -> Iterator[slice]:
        bits = flat.view(np.uint32)
        for start, stop in self._places[block]:
            # The first element almost always decides; the whole vector is seldom read.
            if start == stop or bits.item(start) != _NO_GRADIENT_BITS:
                continue
            if (bits[start:stop] == _NO_GRADIENT_BITS).all():
                yield slice(start, stop)

    def commit(self) -> None:
        """The step is committed: what was lost in it is what the next step sends."""
        for block, candidate in self._candidates.items():
            # In this order: what waits are views of the vector that becomes spare, and is written
            # over.
            lost = candidate.settle()
            if (before := self._residuals.get(block)) is not None:
                self._spare[block] = before
            self._residuals[block] = lost
        self._candidates = {}

    def discard(self) -> None:
        """The attempt came to nothing: the next one begins with the same residuals."""
        # Dropped, and not used again: threads of a void round may still write to them.
        self._candidates = {}

    def reset(self) -> None:
        """Makes all residuals zero."""
        self._candidates, self._residuals, self._spare = {}, {}, {}
