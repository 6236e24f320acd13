"""The candidate: what a worker brings to a line, and why it may not be able to join again.

A Join says the same of the worker each time; only its head and what it holds change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from andon.host.manifest import CheckpointFacts
from andon.protocol.arithmetic import Arithmetic
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.run_settings import Policy, RunPlan
from andon_trainer.errors import JoinRefused
from andon_trainer.exchange.control.transfer import State

__all__ = ["Candidate", "refuse_other_options", "refuse_other_plan", "refuse_other_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a worker brings to the line."""

    layout: Layout
    plan: RunPlan
    replica: State
    device: tuple[str, str, int, int]
    """Kind, name, memory in bytes, and cores."""
    origin: CheckpointFacts | None = None
    """Of the checkpoint that it loaded; None: it comes with initial weights."""
    arithmetic: Arithmetic = ()
    """What decides the bits of its results; empty: the line does not ask."""
    restore: Callable[[Path, Key], object] | None = None
    """Loads the checkpoint in a folder, which must be of that record, or raises CheckpointRefused;
    None: it reads none."""
    capabilities: tuple[str, ...] = ()
    """What its loop can do that not every loop can; see `andon.protocol.schedules`."""


def refuse_other_policy(before: Policy, now: Policy) -> None:
    """Refuses a line that works in another way than the one that this worker was set up for.

    Raises:
        JoinRefused: it does; the message says in what.
    """
    for name in _FIXED:
        mine, theirs = (_in_words(getattr(policy, name)) for policy in (before, now))
        if mine != theirs:
            raise JoinRefused(
                name,
                f"the line's {name} was {mine} and now is {theirs}: start its workers anew, "
                "from a checkpoint",
                component=name,
                mine=mine,
                theirs=theirs,
            )


def refuse_other_options(given: Iterable[str], mine: Policy, theirs: Policy, address: str) -> None:
    """Refuses a line that works in another way than the script asks for.

    Args:
        given: names of the options that it gives; those that a policy does not show are let pass.
        mine: the policy that they mean.
        theirs: the line's.
        address: of the line, for the message.

    Raises:
        JoinRefused: an option is another one there.
    """
    for name in given:
        if not hasattr(theirs, name):
            continue
        wanted, found = _in_words(getattr(mine, name)), _in_words(getattr(theirs, name))
        if wanted != found:
            raise JoinRefused(
                "line_options",
                f"the script's line_options ask for {name} {wanted}, and the line at {address} "
                f"has {found}: start its service with --{name.replace('_', '-')}, or leave {name} "
                "out of line_options",
                component=name,
                mine=wanted,
                theirs=found,
            )


def refuse_other_plan(mine: RunPlan, theirs: RunPlan) -> None:
    """Refuses a line that has other grains: its coordinator may know nothing of them.

    Raises:
        JoinRefused: it has.
    """
    if (mine.grain, mine.tree) != (theirs.grain, theirs.tree):
        raise JoinRefused(
            "capability",
            "the coordinator does not keep the same bits on any number of workers: update it, or "
            "leave same_bits (ANDON_SAME_BITS) out",
        )


_FIXED = (
    *("topology", "encoding", "answer_encoding", "mean"),
    *("local_steps", "outer", "overlap", "overlap_steps", "fragments", "mix"),
    "average_buffers",
)
"""The fields of a policy that a worker is set up for. It looks the others up in each step."""


def _in_words(value: object) -> str:
    if isinstance(value, Encoding):
        return value.label
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)
