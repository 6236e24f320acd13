"""Random generators: their states as a tree, and which of them a resumed worker takes over.

Theory of operation. Rank 0 alone writes a checkpoint, so it holds rank 0's generators: Python's,
NumPy's, torch's for the CPU and for rank 0's CUDA device. Numbers that each worker draws for
itself (dropout masks) differ between workers, and can't be restored from rank 0. Numbers that all
workers draw alike, because they were seeded alike, can. To tell the two apart, a checkpoint also
holds a digest of each generator as it was when rank 0 joined. A resumed worker takes over the
generators that began as its own did now, and leaves the others alone. A worker that is alone, or
in slot 0, takes over all of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from andon_trainer.state.trees import split_tree

__all__ = ["capture", "digests", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators, by name: `python`, `numpy`, `torch`, `cuda`."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Sets the generators that `states` names; `cuda` only if `device` is a CUDA device."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def digests(states: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each state, hexadecimal, by name."""
    return {name: _digest(state) for name, state in states.items()}


def _digest(state: Any) -> str:
    skeleton, tensors = split_tree(state)
    digest = hashlib.sha256(json.dumps(skeleton).encode())
    for tensor in tensors.values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
