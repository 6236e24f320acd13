"""Slow cause: what makes a worker slow, by its readings.

Pure. What surrounds a process explains more than the line that it is in: a process that waits for
a core, for a page or for its GPU's clock is slow wherever it is. So those are looked for first.
"""

from __future__ import annotations

import enum

from andon.protocol.slowness import Explanation, ProcessFacts, SlowPhase

__all__ = [
    "COMPUTES",
    "SLEEPS",
    "UNSENT_BYTES",
    "SlowCause",
    "cause_of",
    "host_lacks",
    "other_cores",
    "own_cores",
    "waited_for_core",
]

_HELD_S = 0.7
"""So long a thread does not wait for a switch of threads alone."""
_SHORT_OF_CORES = 0.2
"""A thread that waits for a core for so much of its time would be faster with more of them."""
_SHORT_BEHIND = 0.5
"""The same for all threads together, where the script's own waits for what they do."""
_USES_ALL = 0.8
"""Who uses so much of what it may use lacks it by itself."""
_HELD_BACK, _STOLEN = 0.2, 0.3
"""From here on a quota of processor time, or cores given to other machines, are a cause."""
_MEMORY_PRESSURE = 0.2
_BUSY_OTHERS = 0.5
"""Cores that others keep busy, from which on they are a cause."""
_FAULTS = 50.0
"""Major page faults a second; each takes a tenth of a millisecond to ten."""
_SWAPPED_IN = 2.0**20
_WAITS_FOR_DISK = 0.2
_THROTTLED = 0.8
"""A GPU below this part of its greatest clock is slow, if it says that something holds it back."""
SLEEPS, COMPUTES = 0.15, 0.6
"""Cores that a thread uses which sleeps, or computes."""
UNSENT_BYTES = 2**16
"""What waits to be sent on a connection that is too slow; less is on its way on any one."""


class SlowCause(enum.Enum):
    """What makes a worker slow, as far as its readings say."""

    LOCK = "lock"
    """Nothing of the process but one call ran."""
    NEIGHBOUR = "neighbour"
    """Other programs of its host take its cores."""
    CORES = "cores"
    """It has more threads and processes than cores."""
    QUOTA = "quota"
    """Its container may not use more processor time."""
    STOLEN = "stolen"
    """Other virtual machines take the cores of its host."""
    MEMORY = "memory"
    """Pages come back from a disk."""
    GPU = "gpu"
    """Its GPU holds itself back."""
    NETWORK = "network"
    DISK = "disk"
    SCRIPT = "script"
    """The code that it is in."""


def cause_of(answer: Explanation) -> SlowCause:
    """The cause that readings tell of; SCRIPT if nothing but its own code is to be seen."""
    facts = answer.facts
    if facts.held_s >= _HELD_S:
        return SlowCause.LOCK
    # Before the wait for a core: a thread that waits for pages competes for the disk, too.
    if _lacks_memory(facts):
        return SlowCause.MEMORY
    if facts.gpu_throttled and _clock(facts) < _THROTTLED:
        return SlowCause.GPU
    short = _short_of_cores(answer)
    if short is not None:
        return short
    if (facts.waited_for_disk or 0.0) >= _WAITS_FOR_DISK:
        return SlowCause.DISK
    if answer.phase is SlowPhase.EXCHANGE and (
        (facts.unsent_bytes or 0) >= UNSENT_BYTES or facts.retransmitted
    ):
        return SlowCause.NETWORK
    return SlowCause.DISK if answer.phase is SlowPhase.DISK else SlowCause.SCRIPT


def host_lacks(answer: Explanation) -> float:
    """How much a worker lacks because of what surrounds it, above 0 and to 1; 0: nothing.

    Its own threads and code are not counted: all workers of a line have the same.
    """
    facts, cause = answer.facts, cause_of(answer)
    if cause is SlowCause.MEMORY:
        return 1.0
    if cause not in (SlowCause.NEIGHBOUR, SlowCause.QUOTA, SlowCause.STOLEN):
        return 0.0
    parts = waited_for_core(answer), facts.throttled or 0.0, facts.stolen_cores or 0.0
    return min(1.0, max(parts))


def _lacks_memory(facts: ProcessFacts) -> bool:
    faults, swapped = facts.major_faults or 0.0, facts.swapped_in or 0.0
    if faults >= _FAULTS or (facts.swap_bytes and swapped >= _SWAPPED_IN):
        return True
    # Without those, a thread that waits in the kernel as for a disk, while memory is short.
    waits = (facts.waited_for_disk or 0.0) >= _WAITS_FOR_DISK
    return waits and (facts.memory_pressure or 0.0) >= _MEMORY_PRESSURE


def _short_of_cores(answer: Explanation) -> SlowCause | None:
    """Who takes the processor time that it lacks; None: it lacks none."""
    facts = answer.facts
    if (facts.throttled or 0.0) >= _HELD_BACK:
        return SlowCause.QUOTA
    if (facts.stolen_cores or 0.0) >= _STOLEN and (facts.script_cores or 0.0) > SLEEPS:
        return SlowCause.STOLEN
    if waited_for_core(answer) < _SHORT_OF_CORES:
        return None
    uses_all = facts.allowed_cores and own_cores(facts) >= _USES_ALL * facts.allowed_cores
    others = other_cores(facts) >= _BUSY_OTHERS and not uses_all
    return SlowCause.NEIGHBOUR if others else SlowCause.CORES


def waited_for_core(answer: Explanation) -> float:
    """The part of the time in which what the worker waits for waited for a core."""
    facts = answer.facts
    waited = facts.waited_for_core
    if waited is None and (facts.script_cores or 0.0) > SLEEPS:
        waited = facts.cpu_pressure  # A kernel that does not count it for each thread.
    behind = facts.threads_waited or 0.0
    if answer.phase in (SlowPhase.EXCHANGE, SlowPhase.DATA) and behind >= _SHORT_BEHIND:
        # The script's thread waits for others of its process: they are what lacks a core.
        waited = max(waited or 0.0, min(1.0, behind))
    return waited or 0.0


# ------------------------------------------------------------------------------------ numbers


def own_cores(facts: ProcessFacts) -> float:
    """Cores that a worker and the processes that it started kept busy."""
    return (facts.process_cores or 0.0) + (facts.child_cores or 0.0)


def other_cores(facts: ProcessFacts) -> float:
    """Cores that everything else on its host kept busy."""
    return max(0.0, (facts.host_busy_cores or 0.0) - own_cores(facts))


def _clock(facts: ProcessFacts) -> float:
    """The GPU's clock as a part of its greatest; 0 if it is not known, and only said to be low."""
    return (facts.gpu_mhz or 0.0) / facts.gpu_most_mhz if facts.gpu_most_mhz else 0.0
