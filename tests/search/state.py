"""A state: everything at one moment, as numbers of parts; and the bounds of a world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from search.numbers import Stream

__all__ = [
    "ALL_FAULTS",
    "FOR_GOOD",
    "LEARNING_FAULTS",
    "NOTICE",
    "OVERLAP_FAULTS",
    "RAISED",
    "RELAYED",
    "WRONG_ARITHMETIC",
    "Bounds",
    "Draft",
    "Label",
    "Queue",
    "State",
]

Label = tuple[object, ...]
"""What happened: a verb, then what tells it from all else that may happen then."""

Queue = tuple[int, ...]

ALL_FAULTS = frozenset(
    {
        "crash",  # of a worker; a fresh process takes its slot
        "break",  # of a control stream
        "lease",  # a worker falls silent for so long that the coordinator closes its stream
        "data",  # a data stream breaks
        "transfer",  # a state transfer breaks
        "reducer",  # the reducer dies and comes back
        "cord",  # a person halts the line
        "defect",  # a worker finds a non-finite value
        "number",  # a worker reports a number that no worker can have
        "kept",  # the coordinator dies and comes back on its journal
        "lost",  # ... without it
        "cut",  # ... on a journal that lacks its last record
        "power",  # ... and some workers with it, which come back with a checkpoint or without
    }
)

LEARNING_FAULTS = (ALL_FAULTS - {"power"}) | {
    "stopped",  # a worker's process is stopped, and goes on at some time
}

RAISED = "anew"  # a script raises in the middle of a step, catches that, and loops again
"""A fault that no other world has: with it the largest ones would be larger still."""

NOTICE = "notice"  # a worker's machine is about to go: a fresh one comes once it was sent away
"""Likewise."""

WRONG_ARITHMETIC = "wrong"  # a worker computes a grain wrong, its own or one that it verifies
"""Likewise; where steps are verified."""

RELAYED = "relayed"  # a sum that is relayed comes otherwise than it was sent
"""Likewise; with three workers or more, since two have each other's sums."""

FOR_GOOD = "for good"  # a worker's process dies, and none comes in its place
"""Likewise; where the line ends the run."""

OVERLAP_FAULTS = ALL_FAULTS | {
    "leaves",  # a script leaves its epoch early
    "nan",  # a worker finds a non-finite value in what it computes
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large a world is."""

    workers: int = 2
    faults: int = 1
    steps: int = 2
    """Steps after which the workers ask for no more."""
    chunks: int = 1
    """Chunks of a worker's gradients."""
    min_workers: int = 1
    expect: int = 0
    """How many workers the line waits for; 0: all."""
    checkpoint: int | None = None
    """The step of which a checkpoint is written, that a worker may come back with."""
    means: int = 0
    """Numbers that the workers average after each step, before they ask for the next."""
    local: bool = False
    """Whether the workers make local steps, and exchange the change of their weights."""
    overlap: bool = False
    """Whether the workers compute a window ahead while the last one's change travels."""
    fragments: int = 1
    """In how many parts the model is exchanged, if the workers make local steps."""
    quorum: bool = False
    """Whether a window of local steps goes on once one worker has computed; then workers learn."""
    standing: bool = False
    """Whether workers ask for the next step with their report of each."""
    windows: int = 0
    """Windows in an epoch; 0: so many that no search gets to its end."""
    patient: bool = False
    """Whether one end of a state transfer waits for the other for ever."""
    computes: bool = False
    """Whether anything may happen while a worker computes what its exchange sends."""
    learns: bool = False
    """Whether workers learn the line's state while it trains."""
    spares: bool = False
    """Whether those that the line does not wait for are spares, and every process that comes in the
    place of another."""
    grains: bool = False
    """Whether workers send the nodes of a tree, of grains of one position."""
    verifies: bool = False
    """Whether each step is verified; then there are grains."""
    ends: bool = False
    """Whether the line ends the run after the last step, and each worker leaves when it hears."""
    kinds: frozenset[str] = ALL_FAULTS

    @property
    def expected(self) -> int:
        """How many workers the line waits for."""
        return self.expect or self.workers


class State(NamedTuple):
    """Everything at one moment."""

    faults: int
    """How many may still happen."""
    coordinator: int
    journal: int
    reducer: int
    workers: tuple[int, ...]
    ups: tuple[tuple[Stream, Queue], ...]
    """Control streams that the coordinator has not seen the end of, with what is on its way."""
    downs: tuple[Queue, ...]
    """What is on its way to each worker, or in its inbox: of its present stream alone."""
    data_ups: tuple[tuple[Stream, Queue], ...]
    data_downs: tuple[Queue, ...]
    checkpoint: int | None = None
    """The checkpoint that was written last."""


@dataclass(slots=True)
class Draft:
    """A new state under construction, made from another one."""

    faults: int
    coordinator: int
    journal: int
    reducer: int
    workers: list[int]
    ups: dict[Stream, Queue]
    downs: list[Queue]
    data_ups: dict[Stream, Queue]
    data_downs: list[Queue]
    checkpoint: int | None = None

    @classmethod
    def of(cls, state: State) -> Draft:
        """To change."""
        return cls(
            state.faults,
            state.coordinator,
            state.journal,
            state.reducer,
            list(state.workers),
            dict(state.ups),
            list(state.downs),
            dict(state.data_ups),
            list(state.data_downs),
            state.checkpoint,
        )

    def state(self) -> State:
        """As it is now."""
        return State(
            self.faults,
            self.coordinator,
            self.journal,
            self.reducer,
            tuple(self.workers),
            tuple(sorted(self.ups.items())),
            tuple(self.downs),
            tuple(sorted(self.data_ups.items())),
            tuple(self.data_downs),
            self.checkpoint,
        )
