"""Own weights: what a worker has beyond the line's weights when a round is committed.

Theory of operation. A commit gives the line new weights, in all blocks or in one fragment of them.
What a worker changed, and did not send, must outlive that: steps that it made ahead, and all that a
rank that abstained has. In the blocks of the round

    own weights = line's new weights + (own - line's old - what was sent of that)

In the other blocks nobody's weights move: there this worker's own are simply left as they are, and
what they have beyond the line's is sent when those blocks have their turn.

With a factor `mix` a worker keeps a part of where it was, instead of jumping to the line's weights:
`mix * own + (1 - mix) * that`. What it kept is sent with the next exchange of these blocks.

Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed
Free Lunch", arXiv:2501.18512.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["OwnWeights", "Part"]

Part = tuple[int, torch.Tensor]
"""A parameter, and its id."""


class OwnWeights:
    """A worker's own weights in the blocks of a round, across its commit."""

    def __init__(
        self,
        parts: Iterable[Part],
        start: Mapping[int, torch.Tensor],
        sent: Mapping[int, torch.Tensor] | None,
        mix: float = 0.0,
    ) -> None:
        """Notes them, before the line's weights take their place.

        Args:
            parts: the parameters that were exchanged.
            start: the line's old weights, by the parameters' ids.
            sent: the change that was sent, `start - own` when it left; empty: nothing was sent;
                None: all of it was.
            mix: the factor with which the own weights are kept.
        """
        self._mix = mix
        self._beyond: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for key, part in parts:
                if mix:
                    self._before[key] = part.detach().float().clone()
                if sent is not None:
                    beyond = part.detach().float() - start[key].float()
                    self._beyond[key] = beyond + sent[key] if key in sent else beyond

    def lay_on(self, parts: Iterable[Part]) -> None:
        """Moves the parameters, which hold the line's new weights, to this worker's own."""
        with torch.no_grad():
            for key, part in parts:
                # In float32, whatever the parameter's type.
                own = part.float()
                if key in self._beyond:
                    own = own + self._beyond[key]
                if self._mix:
                    own = self._mix * self._before[key] + (1.0 - self._mix) * own
                part.copy_(own)
