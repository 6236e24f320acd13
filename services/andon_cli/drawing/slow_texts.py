"""Slow texts: who was slow and why, as text and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from andon.protocol.slowness import ProcessFacts, Slowness
from andon_cli.drawing.texts import moment_text

__all__ = ["slow_brief", "slow_fields", "slow_lines"]

_STACK_SHOWN = 8


def slow_brief(slow: Slowness) -> str:
    """One line: `step 118, 0.8 s late: worker 1 waits for data at ...`."""
    return f"step {slow.step}, {slow.late_s:.1f} s late: {slow.text}"


def slow_lines(found: Sequence[Slowness]) -> list[str]:
    """Each slowness as text: when, why, where its threads were, and how its process was."""
    lines: list[str] = []
    for slow in found:
        at = moment_text(slow.at_unix_s)
        lines += [""] if lines else []
        lines.append(f"{at}  step {slow.step}  {slow.late_s:.1f} s late  in {slow.phase.label}")
        lines.append(f"  {slow.text}")
        for stack in slow.stacks:
            lines.append(f"  {stack.thread}")
            lines += [
                f"  {'>' if each.own else ' '} {each.file}:{each.line} in {each.function}"
                for each in stack.lines[:_STACK_SHOWN]
            ]
        if slow.facts is not None:
            said = [f"{name} {_number(value)}" for name, value in _known(slow.facts)]
            lines.append(f"  {', '.join(said)}")
    return lines


def slow_fields(slow: Slowness) -> dict[str, Any]:
    """For JSON, the phase by its name."""
    return asdict(slow) | {"phase": slow.phase.label}


def _known(facts: ProcessFacts) -> list[tuple[str, Any]]:
    """What the machine said, less zeros."""
    values = [(each.name, getattr(facts, each.name)) for each in fields(facts)]
    return [(name.replace("_", " "), value) for name, value in values if value]


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
