"""The report: what a run came to, read from its journal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from andon_cli.errors import ExitCode
from andon_cli.progress import duration
from andon_coordinator.transport.reader import AnsweredHalt, JournalReader
from andon_coordinator.transport.store import JournalError

__all__ = ["RunReport", "read_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run came to.

    `losses` and `samples` hold one number a committed step; `digests` the SHA-256 of each worker's
    final weights, by worker id; `seconds` the time of the whole command, `training_seconds` from
    the founding of the line to its last record.
    """

    run_id: str
    steps: int
    losses: list[float]
    samples: list[int]
    digests: dict[str, str]
    seconds: float
    training_seconds: float
    journal: str
    metrics_url: str
    halts: list[dict[str, Any]]
    complete: bool
    exit_code: int

    @property
    def outcome(self) -> str:
        """The run's last line, such as
        `complete: 1000 steps, loss 1.871, 1m58s, all workers at digest 9c1e04..., runs/7f3a`.
        """
        parts = [f"{self.steps} step{'' if self.steps == 1 else 's'}"]
        if self.losses:
            parts.append(f"loss {self.losses[-1]:.3f}")
        parts.append(duration(self.seconds))
        digests = set(self.digests.values())
        if self.complete and len(digests) == 1:
            parts.append(f"all workers at digest {digests.pop()[:6]}...")
        parts.append(str(Path(self.journal).parent))
        return f"{_HEADINGS.get(self.exit_code, 'failed')}: {', '.join(parts)}"

    def write(self, path: Path) -> None:
        """Writes it as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)


_HEADINGS: dict[int, str] = {
    ExitCode.COMPLETE: "complete",
    ExitCode.HALTED: "halted",
    ExitCode.REFUSED: "refused",
    ExitCode.LOST: "lost the line",
    ExitCode.INTERRUPTED: "interrupted",
}


def read_report(
    journal: Path, *, run_id: str, workers: int, seconds: float, metrics_url: str, verdict: ExitCode
) -> RunReport:
    """The report of a run whose service has ended.

    Args:
        journal: where its journal is; there may be none, if the service failed early.
        run_id: names the run.
        workers: how many workers the line expected.
        seconds: how long the command took.
        metrics_url: where the metrics were.
        verdict: what the processes' exit codes say. A run whose journal says that it did not
            complete does not count as complete, whatever its processes say.
    """
    try:
        with JournalReader(journal) as reader:
            chain, halts, departures = reader.chain(), reader.halts(), reader.departures()
            digests = reader.digests()
    except JournalError:
        chain, halts, departures, digests = [], [], [], {}
    results = [entry.result for entry in chain if entry.result is not None]
    last = {departure.worker: departure.reason for departure in departures}
    complete = (
        list(last.values()).count("COMPLETE") == len(last) >= workers
        and len(set(digests.values())) <= 1
        and all(halt.answer is not None for halt in halts)
    )
    if verdict is ExitCode.COMPLETE and not complete:
        unanswered = any(halt.answer is None for halt in halts)
        verdict = ExitCode.HALTED if unanswered else ExitCode.FAILED
    return RunReport(
        run_id=run_id,
        steps=chain[-1].record.step if chain else 0,
        losses=[result.loss for result in results],
        samples=[result.samples for result in results],
        digests={str(worker): digest for worker, digest in sorted(digests.items())},
        seconds=round(seconds, 3),
        training_seconds=round(chain[-1].at_unix_s - chain[0].at_unix_s, 3) if chain else 0.0,
        journal=str(journal),
        metrics_url=metrics_url,
        halts=[_halt(halt) for halt in halts],
        complete=complete,
        exit_code=int(verdict),
    )


def _halt(halt: AnsweredHalt) -> dict[str, Any]:
    evidence = halt.evidence
    return {
        "id": evidence.id,
        "reason": evidence.reason.label,
        "step": evidence.step,
        "worker": evidence.worker,
        "block": evidence.block,
        "parameter": evidence.parameter,
        "element": list(evidence.element),
        "value": evidence.value,
        "message": evidence.message,
        "answer": None if halt.answer is None else halt.answer.name.lower(),
    }
