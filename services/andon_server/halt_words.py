"""Halt words: a halt and its possible answers, as the terminal and the board say them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.limits import on_one_line

__all__ = ["PossibleAnswer", "answers_to", "evidence_fields", "halted_line", "help_page"]

_NO_OTHER_ANSWER = (
    HaltReason.JOURNAL,
    HaltReason.STATE_LOST,
    HaltReason.CHECKPOINT,
    HaltReason.TOO_FEW_WORKERS,
)
"""Where skipping or dropping does not help: what is missing must be restored first."""

_SPIKES = (HaltReason.LOSS_SPIKE, HaltReason.GRADIENT_NORM_SPIKE)
"""Values that an operator may accept: the step is tried again, and passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PossibleAnswer:
    """A way to answer a halt."""

    answer: HaltAnswer
    worker: int | None = None
    """The worker that DROP would drop; None: the person has to choose one, or it is no DROP."""
    label: str
    """A few words for a button: `Try again`."""
    effect: str
    """What it does: `try the step again`."""
    command: str
    """The command that gives this answer."""


def halted_line(halt: HaltEvidence) -> str:
    """A halt in one line."""
    # What a worker said is a part of it, and may come from the journal of an older version.
    message = on_one_line(halt.message).rstrip(".") or halt.reason.label.replace("_", " ")
    return f"HALTED at {halt.when}: {message}. {halt.outcome}"


_HELP = {
    HaltReason.LOSS_SPIKE: "docs/halts.md#spikes",
    HaltReason.GRADIENT_NORM_SPIKE: "docs/halts.md#spikes",
    HaltReason.REPLICA_DIVERGENCE: "docs/halts.md#digests-of-the-weights",
    HaltReason.WRONG_ARITHMETIC: "docs/halts.md#results-that-differ",
    HaltReason.DATA_DIFFERS: "docs/halts.md#samples-that-differ",
    HaltReason.STATE_LOST: "docs/halts.md#lost-state",
    HaltReason.CHECKPOINT: "docs/checkpoints.md",
}


def help_page(halt: HaltEvidence) -> str:
    """The page of the documentation that says what to do, from the root of the sources."""
    return _HELP.get(halt.reason, "docs/guide/halts.md")


def evidence_fields(halt: HaltEvidence) -> dict[str, Any]:
    """A halt for JSON: the reason as a name, the key as text, the place in words. `positions` are
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


def answers_to(halt: HaltEvidence, *, flags: str = "") -> list[PossibleAnswer]:
    """The possible answers, the usual one first.

    Args:
        halt: the halt to answer.
        flags: names the line if a command could not find it by itself: `--run 7f3a`.
    """
    resume = "andon resume" + (f" {flags}" if flags else "")
    worker = "WORKER" if halt.worker is None else str(halt.worker)
    who = "a worker" if halt.worker is None else f"worker {worker}"
    label, effect = _retry_words(halt.reason)
    answers = [PossibleAnswer(answer=HaltAnswer.RETRY, label=label, effect=effect, command=resume)]
    if halt.reason in _NO_OTHER_ANSWER:
        return answers
    if diverged := halt.reason is HaltReason.REPLICA_DIVERGENCE:
        # Trying the step again, or leaving samples out, would not make the weights equal.
        without = f"go on without {who} and its weights"
    else:
        without = f"go on without {who}"
    # Of wrong arithmetic the samples are innocent, too.
    if not diverged and halt.reason is not HaltReason.WRONG_ARITHMETIC:
        samples = 0 if halt.positions is None else len(halt.positions)
        several = "sample" if samples == 1 else "samples"
        lot = f"{samples} {several}" if samples else several
        answers.append(
            PossibleAnswer(
                answer=HaltAnswer.SKIP,
                label=f"Skip the {several}",
                effect=f"leave its {lot} out, and record them as skipped",
                command=f"{resume} --skip",
            )
        )
    accused = halt.claimed and halt.worker is not None
    if accused:
        without += f", as worker {halt.reported_by} says"
    answers.append(
        PossibleAnswer(
            answer=HaltAnswer.DROP,
            worker=halt.worker,
            label=f"Drop {who}",
            effect=without,
            command=f"{resume} --drop {worker}",
        )
    )
    if accused:
        # Which of the two is wrong, only a person can find out.
        answers.append(
            PossibleAnswer(
                answer=HaltAnswer.DROP,
                worker=halt.reported_by,
                label=f"Drop worker {halt.reported_by}",
                effect=f"go on without worker {halt.reported_by}, which said so",
                command=f"{resume} --drop {halt.reported_by}",
            )
        )
    return answers


def _retry_words(reason: HaltReason) -> tuple[str, str]:
    """The label of RETRY, and what it does: that depends on why the line stopped."""
    if reason in _SPIKES:
        return "Accept", "accept the value: the step passes"
    if reason is HaltReason.REPLICA_DIVERGENCE:
        return "Go on", "go on with weights that differ"
    if reason is HaltReason.WRONG_ARITHMETIC:
        return "Try again", "compute the step again, and compare all results again"
    return "Try again", "try the step again"
