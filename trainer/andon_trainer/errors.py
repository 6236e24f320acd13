"""Errors that a training script may see, and the exit codes of those that it does not catch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from andon.protocol.halts import HaltEvidence

__all__ = [
    "AndonError",
    "CheckpointRefused",
    "JoinRefused",
    "LineHalted",
    "LineLost",
    "RunOver",
    "WorkerDropped",
]


class AndonError(Exception):
    """Anything that ends or interrupts a worker's part in a run."""

    exit_code = 1


class LineHalted(AndonError):
    """The line stopped, and nobody's weights moved; unless the reason is that they differ.

    Attributes:
        reason: a name of `andon.protocol.halts.HaltReason` in lower case: `non_finite_gradient`.
        worker: id of the worker at fault; None if no single one is.
        step: the step that was not committed.
        block: index of the block in the layout; None if no block is at fault.
        parameter: name of the parameter; empty if none is at fault.
        element: index in the parameter, one number a dimension.
        value: what was found there, as text: `nan`, `inf`, `-inf` or a number.
        evidence: all of it, as the coordinator sent it.
    """

    exit_code = 3

    def __init__(self, evidence: HaltEvidence) -> None:
        """Carries the evidence of one halt."""
        super().__init__(f"{evidence}. {evidence.outcome}")
        self.evidence = evidence
        self.reason = evidence.reason.label
        self.worker = evidence.worker
        self.step = evidence.step
        self.block = evidence.block
        self.parameter = evidence.parameter
        self.element = evidence.element
        self.value = evidence.value


class JoinRefused(AndonError):
    """The line does not take this worker: `component` is `mine` here and `theirs` on the line."""

    exit_code = 4

    def __init__(
        self, reason: str, message: str, component: str = "", mine: str = "", theirs: str = ""
    ) -> None:
        """Carries the coordinator's answer."""
        super().__init__(message)
        self.reason = reason
        self.component = component
        self.mine = mine
        self.theirs = theirs

    @classmethod
    def in_the_clear(cls, heard: str) -> Self:
        """A worker's own refusal to send what others could read; `heard` says where."""
        return cls(
            "insecure",
            f"{heard}, and nothing would be encrypted: name the folder of this worker's "
            "certificates by ANDON_TLS_DIR (`andon certs` makes it), or accept that with "
            "ANDON_INSECURE=1, on a network that you trust",
            component="tls",
        )


class CheckpointRefused(AndonError):
    """A run can't go on from a checkpoint: it is damaged (`file` says where), or does not fit."""

    exit_code = 4

    def __init__(self, message: str, *, file: Path | None = None) -> None:
        """Says what is wrong, and what to do."""
        super().__init__(message)
        self.file = file


class LineLost(AndonError):
    """There is no line any more: no coordinator at `address`, or it dismissed this worker."""

    exit_code = 5

    def __init__(self, message: str, address: str, last_step: int) -> None:
        """Says which line, and the last step that this worker applied."""
        super().__init__(message)
        self.address = address
        self.last_step = last_step


class WorkerDropped(LineLost):
    """The line goes on without this worker, because a person said so (`andon resume --drop`)."""


class RunOver(LineLost):
    """The run was ended for everybody where this worker waited, such as by `andon drain`.

    A loop over the prepared loader that is under way then ends by itself. One that is begun later
    raises this, and so do other calls, which have nobody left to wait for. A script that does not
    catch it ends well.
    """

    exit_code = 0
