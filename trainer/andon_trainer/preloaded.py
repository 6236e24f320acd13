"""Loads, when it is imported, all that a training script and its first optimizer import.

For processes that fork workers: what they have loaded, no worker needs to load. It starts no
thread, and touches no device.
"""

from __future__ import annotations

import torch

import andon_trainer

__all__: list[str] = []

for _name in andon_trainer.__all__:
    getattr(andon_trainer, _name)
# The first optimizer imports some hundred modules more.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
