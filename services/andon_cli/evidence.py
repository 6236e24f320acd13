"""Evidence: a halt as people and programs read it, the same wherever it is shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from andon.protocol.halts import HaltEvidence, HaltReason

__all__ = ["answer_lines", "evidence_fields", "halted_line"]

_NO_OTHER_ANSWER = (
    HaltReason.JOURNAL,
    HaltReason.STATE_LOST,
    HaltReason.CHECKPOINT,
    HaltReason.TOO_FEW_WORKERS,
)
"""Where skipping or dropping mends nothing: what is missing has to be brought back first."""

_SPIKES = (HaltReason.LOSS_SPIKE, HaltReason.GRADIENT_NORM_SPIKE)
"""What a person may find right: the step is tried again, and passes."""


def halted_line(halt: HaltEvidence) -> str:
    """A halt in one line."""
    message = halt.message.rstrip(".") or halt.reason.label.replace("_", " ")
    return f"HALTED at {halt.when}: {message}. {halt.outcome}"


def evidence_fields(halt: HaltEvidence) -> dict[str, Any]:
    """A halt for JSON: its reason by name, its key as text, its place for people; `positions` are
    the first one and the one after the last.
    """
    return asdict(halt) | {
        "reason": halt.reason.label,
        "key": None if halt.key is None else str(halt.key),
        "element": list(halt.element),
        "positions": (
            None if halt.positions is None else [halt.positions.start, halt.positions.stop]
        ),
        "place": halt.place,
    }


def answer_lines(halt: HaltEvidence, *, flags: str = "") -> list[str]:
    """The answers that a person can give, each as its command and what it does.

    Args:
        halt: what is to be answered.
        flags: what names the line, if the command could not find it: `--run 7f3a`.
    """
    resume = "andon resume" + (f" {flags}" if flags else "")
    worker = "WORKER" if halt.worker is None else str(halt.worker)
    who = "a worker" if halt.worker is None else f"worker {worker}"
    answers = [(resume, _meaning(halt.reason))]
    if halt.reason is HaltReason.REPLICA_DIVERGENCE:
        # To try the step again, or without its samples, makes no weight the same.
        answers.append((f"{resume} --drop {worker}", f"go on without {who} and its weights"))
    elif halt.reason not in _NO_OTHER_ANSWER:
        samples = 0 if halt.positions is None else len(halt.positions)
        several = "sample" if samples == 1 else "samples"
        lot = f"{samples} {several}" if samples else several
        answers += [
            (f"{resume} --skip", f"leave its {lot} out, and record them as skipped"),
            (f"{resume} --drop {worker}", f"go on without {who}"),
        ]
    width = max(len(command) for command, _ in answers)
    return [f"        {command.ljust(width)} {meaning}" for command, meaning in answers]


def _meaning(reason: HaltReason) -> str:
    """What the plain answer does."""
    if reason in _SPIKES:
        return "accept the value: the step passes"
    if reason is HaltReason.REPLICA_DIVERGENCE:
        return "go on with weights that differ"
    return "try the step again"
