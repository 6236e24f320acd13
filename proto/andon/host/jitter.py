"""Jitter: those who lost a service at the same moment do not come back at the same moment."""

from __future__ import annotations

import random

__all__ = ["jittered"]

# The process's own generator belongs to the script: a number more or less drawn from it, as often
# as the network wants, would change what the script draws next.
_OWN = random.SystemRandom()


def jittered(wait_s: float) -> float:
    """A time of half to one and a half times this one, drawn from the system."""
    return _OWN.uniform(0.5, 1.5) * wait_s
