"""Loads, when it is imported, all that a script, its first optimizer and its first channel import.

For processes that fork workers: what they have loaded, no worker needs to load. It starts no
thread, and touches no device.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import numpy.ctypeslib  # noqa: F401 - which `numpy` loads when it is asked for
import torch

import andon_trainer

__all__: list[str] = []

for _name in andon_trainer.__all__:
    getattr(andon_trainer, _name)
# The first optimizer imports some hundred modules more.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
# So does the first channel. The module is gRPC's own, so a version may lack it.
with suppress(ImportError):
    import_module("grpc._channel")
