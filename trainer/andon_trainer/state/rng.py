"""Random generators: their states as a tree, and whose a resumed worker takes over.

Theory of operation. A checkpoint is written by rank 0 alone, so it holds rank 0's generators:
Python's, NumPy's, torch's of the CPU and of rank 0's CUDA device. What each worker draws for itself
(dropout's masks) is another matter on every worker, and can't come from one of them. What all
workers draw alike (they seeded alike, and a script may lean on that) can. They are told apart by
where they began: a checkpoint also holds a digest of each generator as it was when rank 0 joined. A
resumed worker takes over the generators that began as its own did now; the others it leaves alone.
A worker by itself, or in slot 0, takes over all of them.
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
    """Sets the generators named in `states`; `cuda` only if `device` is one."""
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
