"""Errors that a training script may see, and the exit codes of those that it does not catch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from andon.protocol.halts import HaltEvidence
from andon.protocol.sessions import SessionOver

__all__ = [
    "ANOTHER_RUN",
    "AndonError",
    "CallTimedOut",
    "CheckpointRefused",
    "HostLost",
    "JoinRefused",
    "LineHalted",
    "LineLost",
    "RunOver",
    "SessionEnded",
    "StateCorrupt",
    "WorkerDropped",
]


ANOTHER_RUN = (
    "start the script once for each run, `for fold in 0 1 2; do andon run train.py $fold; done`, "
    "or start it with torchrun or alone, where each Line of a script is a run of its own"
)
"""What to do in place of a second `Line` where a line serves one run."""


class AndonError(Exception):
    """Base of everything that ends or interrupts a worker's part in a run.

    Attributes:
        exit_code: the process's exit code if the script does not catch the error.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """How another process gets it: from its text alone, as Python does, most can't be made."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[AndonError], args: tuple[object, ...], state: dict[str, object]) -> object:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class LineHalted(AndonError):
    """The line stopped, and no worker's weights moved.

    It is raised on every worker, by `line.backward`, `optimizer.step()` or the loader. After the
    operator's answer (`andon resume`) a script that caught it goes on by iterating its loader
    again. Only if `reason` is `replica_divergence` have workers' weights moved apart.

    Attributes:
        reason: a name of `andon.protocol.halts.HaltReason` in lower case: `non_finite_gradient`.
        worker: id of the worker at fault; None if no single worker is.
        step: the step that was not committed.
        block: index of the block in the layout; None if no block is at fault.
        parameter: name of the parameter; empty if no parameter is at fault.
        element: index into the parameter, one number for each dimension.
        value: the offending value as text: `nan`, `inf`, `-inf` or a number.
        evidence: the complete evidence, as the coordinator sent it.
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
    """The line does not accept this worker; starting it again unchanged would not help.

    If the run is complete already (`reason` is `complete`), nothing went wrong: a script that does
    not catch it says so in one line, and exits with code 0.

    Attributes:
        reason: what was refused, in lower case: `layout_differs`, `token`, `slot`, `complete`,
            or `another_run` if this process has trained that run to its end.
        component: what differs between this worker and the line; empty if nothing does.
        mine: this worker's value of `component`.
        theirs: the line's value of `component`.
    """

    exit_code = 4

    def __init__(
        self, reason: str, message: str, component: str = "", mine: str = "", theirs: str = ""
    ) -> None:
        """Carries the coordinator's answer, or this worker's own reason not to join."""
        super().__init__(message)
        if reason == "complete":
            # A restart policy that heeds exit codes must not start this worker again and again.
            self.exit_code = 0
        self.reason = reason
        self.component = component
        self.mine = mine
        self.theirs = theirs

    @classmethod
    def in_the_clear(cls, exposed: str) -> Self:
        """A worker's own refusal to send what others could read; `exposed` says where."""
        return cls(
            "insecure",
            f"{exposed}, and nothing would be encrypted: set ANDON_TLS_DIR to the folder of this "
            "worker's certificates (`andon certs` makes it), or set ANDON_INSECURE=1 if you trust "
            "the network",
            component="tls",
        )

    @classmethod
    def another_run(cls, run_id: str) -> Self:
        """A worker's own refusal to join, in one process, the run that it has trained to the end.

        It is no success, though that run is complete: the rest of the script is not run.
        """
        return cls(
            "another_run",
            f"this process has trained run {run_id} to its end, and nobody serves another one at "
            f"its address: {ANOTHER_RUN}",
        )


class CheckpointRefused(AndonError):
    """The run can't be resumed from its checkpoint: it is missing, damaged, or does not fit.

    Attributes:
        file: the damaged file; None if no file is damaged.
    """

    exit_code = 4

    def __init__(self, message: str, *, file: Path | None = None) -> None:
        """Says what is wrong, and what to do."""
        super().__init__(message)
        self.file = file


class LineLost(AndonError):
    """No coordinator answers at `address`, or it dismissed this worker.

    Attributes:
        address: the coordinator's, as host:port.
        last_step: the last step that this worker applied.
    """

    exit_code = 5

    def __init__(self, message: str, address: str, last_step: int) -> None:
        """Carries the line's address and this worker's last step."""
        super().__init__(message)
        self.address = address
        self.last_step = last_step


class WorkerDropped(LineLost):
    """The line goes on without this worker, because an operator ran `andon resume --drop`."""


class RunOver(LineLost):
    """The run ended for all workers, for example by `andon drain`.

    A loop over `line.epochs`, or one that is left when `line.complete` is true, ends by itself, and
    the code after it runs. A script that wants to train on gets `RunOver`: by `line.backward` for a
    batch that the loader yielded after the end, or by a call of a manual step. It exits with code
    1, since what follows its loop was not run.
    """

    exit_code = 0

    def __init__(self, message: str, address: str, last_step: int, exit_code: int = 0) -> None:
        """Carries the line's address and this worker's last step."""
        super().__init__(message, address, last_step)
        self.exit_code = exit_code


class SessionEnded(AndonError, RuntimeError):
    """The session of a plain script's ranks is over, for all of them alike.

    Every call that was open fails with it, and every later one. It is a RuntimeError too, as
    PyTorch's own errors of collectives are.

    Attributes:
        over: why, and who is at fault.
        exit_code: 3 if it was a halt, else 5.
    """

    def __init__(self, over: SessionOver) -> None:
        """Carries the end of one session."""
        super().__init__(over.message)
        self.over = over
        self.exit_code = 3 if over.end.is_halt else 5


class CallTimedOut(AndonError, RuntimeError):
    """Ranks did not do in time what a call needs; the text names them and the call."""

    exit_code = 5


class HostLost(AndonError):
    """Another process of this host is gone, and with it the host's place on the line.

    It is raised where DistributedDataParallel averages inside a host. The other hosts go on.
    """


class StateCorrupt(ValueError):
    """The state that arrived is not one that a worker sends; nothing was installed.

    No script sees it: the transfer fails, and another one brings the state.
    """
