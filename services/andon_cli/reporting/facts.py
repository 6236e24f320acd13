"""Facts of a report: what the journal and the run's folder have, read once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from andon.host.errors import ResumeRefused
from andon.host.manifest import checkpoints_in
from andon_cli.commands.run_facts import RunFacts, reading
from andon_cli.kept_command import KeptCommand
from andon_cli.reporting.spent import Presence, Spent, presences
from andon_coordinator.core.machine_time import Price
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.step_results import Skip
from andon_coordinator.transport.curves import CurvePoint
from andon_coordinator.transport.reader import LedgerFault
from andon_server.crashes import Crash, read_crashes
from andon_server.resuming import find_resumption

__all__ = ["ReportFacts"]

_POINTS = 300
"""A curve has at most so many points: a screen shows no more."""
_COUNTED_STEPS = 100_000
"""The ledger of a longer run is not counted: that needs all of its contributions in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """Everything that a report tells."""

    run: RunFacts
    steps: list[CurvePoint]
    """At most 300, each of one or more steps."""
    logged: dict[str, list[tuple[int, float | None]]]
    """The curve of each name that scripts logged."""
    skips: list[Skip]
    rolled_back: tuple[int, int, float]
    """Steps that do not count any more, their samples, their seconds."""
    ledger: list[LedgerFault] | None
    """None: the run is too long to be counted here."""
    spent: Spent
    presences: list[Presence]
    tokens: float
    """That the script logged as `tokens`, all workers together; 0: it logs none."""
    price: Price | None
    """What an hour of one worker's machine costs, as the journal says; None: nobody said."""
    command: KeptCommand | None
    crashes: list[Crash]
    """How processes of this host failed."""
    checkpoint_step: int | None
    """The step of the newest whole checkpoint; None: there is none."""
    checkpoint_problem: str
    """Why the run can't go on from a checkpoint, though it has some; else empty."""

    @classmethod
    def read(cls, folder: Path) -> ReportFacts:
        """Reads a run's folder.

        Raises:
            JournalError: there is no journal, or it can't be read.
        """
        run = RunFacts.read(folder)
        with reading(folder) as reader:
            steps = reader.step_curve(_POINTS)
            names = reader.scalar_names()
            logged = {name: reader.reduced_scalar_curve(name, _POINTS) for name in names}
            skips, rolled_back = reader.skips(), reader.rolled_back()
            ledger = reader.ledger_faults() if run.totals.steps <= _COUNTED_STEPS else None
            time, price, tokens = reader.machine_time(), reader.price(), reader.tokens()
        times = [event.at_unix_s for event in run.events]
        began = min([run.past.started_unix_s, *times[:1]])
        ended = max([began, *times[-1:], *run.totals.at_unix_s[-1:]])
        steps_s = sum(run.totals.times_s) + rolled_back[2]
        checkpoint, problem = _checkpoint_of(folder)
        return cls(
            run=run,
            steps=steps,
            logged=logged,
            skips=skips,
            rolled_back=rolled_back,
            ledger=ledger,
            spent=Spent.of(run.events, steps_s, run.totals.at_unix_s, began, ended),
            presences=presences(run.events, time.seconds(ended)),
            tokens=tokens,
            price=price,
            command=KeptCommand.read(folder),
            crashes=read_crashes(folder),
            checkpoint_step=checkpoint,
            checkpoint_problem=problem,
        )

    def events(self, *kinds: RunEventKind) -> list[RunEvent]:
        """What happened of these kinds, in order."""
        return [event for event in self.run.events if event.kind in kinds]

    @property
    def attempts_by_cause(self) -> list[tuple[str, int]]:
        """Why steps were tried again, and how often, the most frequent cause first."""
        causes = Counter(
            event.text.partition(": ")[2] or event.text
            for event in self.events(RunEventKind.ATTEMPT)
        )
        return causes.most_common()

    @property
    def worker_hours(self) -> float:
        """The time that workers were on the line, all together, in hours."""
        return sum(each.seconds for each in self.presences) / 3600

    @property
    def ended_because(self) -> str:
        """Why the run ended, as its last step or its last event says; empty if it did not."""
        ends = self.events(RunEventKind.COMPLETE, RunEventKind.SESSION_OVER)
        return ends[-1].text if ends else ""

    @property
    def cost(self) -> float | None:
        """What the workers' machines cost, all together; None: nobody said a price."""
        return None if self.price is None else self.price.of(self.worker_hours * 3600)

    @property
    def per_unit(self) -> tuple[float | None, float | None]:
        """How many samples and tokens one unit of the currency bought; None: nobody knows."""
        price, machine_s = self.price, self.worker_hours * 3600
        if price is None:
            return None, None
        tokens = price.per_unit(self.tokens, machine_s) if self.tokens else None
        return price.per_unit(self.run.totals.samples, machine_s), tokens

    def at_price(self, per_hour: float | None) -> ReportFacts:
        """The same with another price; None: as the journal says."""
        if per_hour is None:
            return self
        currency = "" if self.price is None else self.price.currency
        return replace(self, price=Price(per_hour, currency))

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        count, samples, seconds = self.rolled_back
        return self.run.fields() | {
            "steps_curve": [asdict(each) for each in self.steps],
            "logged_curves": self.logged,
            "skipped": [
                {"epoch": epoch, "positions": [positions.start, positions.stop],
                 "halt": each.halt_id or None, "operator": each.operator}
                for each in self.skips
                for epoch, positions in each.by_epoch
            ],
            "rolled_back": {"steps": count, "samples": samples, "seconds": seconds},
            "ledger_faults": None if self.ledger is None else len(self.ledger),
            "spent": asdict(self.spent) | {"rest_s": self.spent.rest_s},
            "attempts_by_cause": dict(self.attempts_by_cause),
            "presences": [asdict(each) for each in self.presences],
            "worker_hours": self.worker_hours,
            "cost": self.cost,
            "samples_per_unit": self.per_unit[0],
            "tokens_per_unit": self.per_unit[1],
            "price_per_hour": None if self.price is None else self.price.per_hour,
            "currency": "" if self.price is None else self.price.currency,
            "command": list(self.command.command) if self.command else [],
            "crashes": [each.to_json() for each in self.crashes],
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_problem": self.checkpoint_problem,
        }  # fmt: skip


def points_of(steps: Sequence[CurvePoint], name: str) -> list[tuple[int, float | None]]:
    """The curve of one field of the steps; a value that is not finite is None."""
    return [(each.step, _finite(getattr(each, name))) for each in steps]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _checkpoint_of(folder: Path) -> tuple[int | None, str]:
    if not checkpoints_in(folder):
        return None, ""
    try:
        return find_resumption(str(folder)).facts.step, ""
    except ResumeRefused as error:
        return None, str(error)
