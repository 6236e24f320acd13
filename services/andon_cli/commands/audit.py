"""`andon audit`: recomputes a run's steps with its own script, and names the first that differs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.host.audit_files import AuditOrder, write_order
from andon.host.errors import ExitCode
from andon.host.strict_json import strict_json
from andon.protocol.arithmetic import ENVIRONMENT, difference, in_order, remedy
from andon_cli.auditing.config import AuditConfig
from andon_cli.auditing.folder import AuditFolder
from andon_cli.auditing.judging import Difference, Judge
from andon_cli.auditing.scope import AuditRefused, Scope, scope_of
from andon_cli.auditing.script import AuditedScript
from andon_cli.commands.run_facts import find_folder
from andon_cli.kept_command import KeptCommand
from andon_cli.launching.processes import of_no_launch
from andon_coordinator.transport.audit_book import AuditBook
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_server.runs import JOURNAL

__all__ = ["AuditOutcome", "audit_run"]

_SAY_EVERY_S = 5.0
_DRAW_EVERY_S = 0.2
_NOTE_EVERY_S = 1.0
_STATE_LOST = (
    "what of the script's state is in no checkpoint began anew there (line.register keeps more)"
)


@dataclass(slots=True, kw_only=True)
class AuditOutcome:
    """What an audit found."""

    scope: Scope
    difference: Difference | None = None
    nodes: int = 0
    tolerance: float | None = None
    """Of a run without equal bits; None: it had them."""
    farthest: tuple[float, int] = 0.0, 0
    """By which part a loss has differed most within it, and in which step."""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The last line."""
        if self.difference is not None:
            return self.difference.in_words
        scope, known = self.scope, self.scope.known
        steps = f"steps {scope.first} to {scope.last} recomputed"
        if self.tolerance is not None:
            apart, step = self.farthest
            most = f"; at most {apart:.1e} of it, in step {step}" if step else ""
            return (
                f"{steps}: no loss differs by more than {self.tolerance:g} of it{most}. The run "
                "was trained without same_bits, so its bits can't be compared"
            )
        if not known:
            return (
                f"{steps}: all losses equal; the journal knows no weights to compare "
                "(--digest-every N, or --verify)"
            )
        if len([step for step in known if step >= scope.first]) == scope.last - scope.first + 1:
            return f"{steps}: all weights equal, and all losses"
        moments = "1 step" if len(known) == 1 else f"{len(known)} steps"
        return (
            f"{steps}: all losses equal, and all weights that the journal knows, after {moments}, "
            f"the last one {known[-1]}"
        )

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        scope, difference = self.scope, self.difference
        return {
            "run_id": scope.run_id,
            "first": scope.first,
            "last": scope.last,
            "equal": difference is None,
            "verdict": self.verdict,
            "weights_known": len(scope.known),
            "grains_compared": self.nodes,
            "tolerance": self.tolerance,
            "farthest": None if self.tolerance is None else self.farthest[0],
            "checkpoint": None if scope.checkpoint is None else str(scope.checkpoint),
            "difference": None if difference is None else difference.fields(),
            "notes": self.notes,
        }


def audit_run(config: AuditConfig) -> int:
    """Audits a run. Returns the exit code: 0 if all is equal, 1 if a step differs.

    Raises:
        AuditRefused: the run can't be audited, or its script did not come to the last step.
        UsageError: there is no such run, or it has no such steps.
    """
    run_dir = find_folder(config.run)
    screen = _Screen(shown=config.settings.format == "table")
    try:
        with journal_errors(run_dir / JOURNAL), closing(AuditBook(run_dir / JOURNAL)) as book:
            scope = scope_of(book, run_dir, config.first, config.last)
            with AuditFolder.open((config.settings.out or run_dir / "audit").absolute()) as folder:
                outcome = _Audit(config, run_dir, book, scope, folder, screen).run()
    except JournalError as error:
        raise AuditRefused(str(error)) from error
    screen.end()
    if config.settings.format == "json":
        print(strict_json(outcome.fields()))
    else:
        print("\n".join([*outcome.notes, outcome.verdict]))
    return ExitCode.COMPLETE if outcome.difference is None else ExitCode.FAILED


class _Audit:
    """One audit, from its order to its outcome."""

    def __init__(
        self,
        config: AuditConfig,
        run_dir: Path,
        book: AuditBook,
        scope: Scope,
        folder: AuditFolder,
        screen: _Screen,
    ) -> None:
        self._config = config
        self._book = book
        self._folder = folder
        self._screen = screen
        self._kept = KeptCommand.read(run_dir) or KeptCommand()
        self._command = _command_of(config, self._kept)
        if scope.exact:
            _refuse_encoding(self._kept)
        tolerance = None if scope.exact else config.settings.tolerance
        self._outcome = AuditOutcome(scope=scope, tolerance=tolerance)
        head = next(book.backwards()).record.key
        self._identity = {
            "run": scope.run_id,
            "first": scope.first,
            "last": scope.last,
            "head": str(head),
            "command": list(self._command),
        }

    def run(self) -> AuditOutcome:
        """Recomputes, and compares."""
        outcome, folder, book = self._outcome, self._folder, self._book
        scope = self._resumed()
        folder.clear(checkpoints=scope is outcome.scope)
        order = AuditOrder(
            run_id=scope.run_id,
            plan=scope.plan,
            layout=scope.layout,
            origin=scope.origin,
            last_step=scope.last,
            report=folder.report,
        )
        write_order(folder.order, order, scope.records(book))
        self._note(scope)
        folder.note(self._identity, scope.origin.step)
        judge = Judge(
            book.forward(scope.origin.key),
            scope.weights,
            book.attested,
            book.layout(),
            outcome.tolerance,
        )
        with (
            self._noting(judge, scope),
            AuditedScript(
                self._command, self._environment(scope), self._folder_of_script, folder.output
            ) as script,
        ):
            outcome.difference = self._follow(script, judge, scope)
        outcome.nodes, outcome.farthest = judge.nodes, judge.farthest
        if outcome.difference is not None and outcome.difference.step <= scope.first == 1:
            outcome.notes.append(
                "it is the run's first step: a script whose first weights are drawn without a "
                "seed (torch.manual_seed) can be audited from its first checkpoint on only"
            )
        folder.note(self._identity, judge.step or scope.origin.step, over=True)
        return outcome

    def _resumed(self) -> Scope:
        """The scope, or what is left of it if an earlier audit of it was interrupted."""
        scope = self._outcome.scope
        equal_to = 0 if self._config.settings.anew else self._folder.equal_to(self._identity)
        own = self._folder.checkpoint(equal_to) if equal_to > scope.origin.step else None
        if own is None:
            return scope
        rest = scope.from_checkpoint(self._book, own)
        if rest.origin.step <= scope.origin.step:
            return scope
        self._outcome.notes.append(
            f"an earlier audit was interrupted, with all equal up to step {rest.origin.step}: this "
            f"one went on from its own checkpoint; {_STATE_LOST}"
        )
        return rest

    def _note(self, scope: Scope) -> None:
        """Says what the audit can't know."""
        notes, whole = self._outcome.notes, self._outcome.scope
        if whole.shortened:
            notes.append(
                f"only steps {whole.first} to {whole.last}: without same_bits rounding grows from "
                "step to step (--steps A:B says others)"
            )
        if whole.checkpoint is not None:
            notes.append(f"began with the checkpoint of step {whole.origin.step}: {_STATE_LOST}")
        for step in self._book.resumed_at(scope.origin.step, scope.last)[:8]:
            notes.append(
                f"after step {step} the run was resumed or rolled back: if its script kept state "
                f"in no checkpoint, audit from there on by itself (--steps {step + 1}:)"
            )

    def _follow(self, script: AuditedScript, judge: Judge, scope: Scope) -> Difference | None:
        """Compares what the script says, until its end or the first difference."""
        next_note = time.monotonic() + _NOTE_EVERY_S
        for said in script.says(self._folder.report):
            step = judge.step or scope.origin.step
            self._screen.show(step, scope)
            if time.monotonic() >= next_note:
                next_note = time.monotonic() + _NOTE_EVERY_S
                self._folder.note(self._identity, step)
            if said is None:
                continue
            if said["what"] == "began":
                self._note_arithmetic(said["arithmetic"])
            difference = judge.take(said)
            if difference is not None:
                return difference
            if said["what"] == "over":
                return None
            if said["what"] == "left":
                raise AuditRefused(
                    f"{said['message']} at step {said['step']}, and the run has {scope.last}: give "
                    "andon audit the run's own script, arguments and data"
                )
        raise AuditRefused(
            f"the script stopped at step {judge.step or scope.origin.step} of {scope.last}: it "
            f"{script.ended_how}"
        )

    def _note_arithmetic(self, mine: Mapping[str, str]) -> None:
        """Says what this machine computes with that the run's did not."""
        theirs = [each.items for each in self._book.arithmetics() if each.items]
        found = difference(in_order(mine), theirs[0]) if theirs else None
        if found is not None:
            name, here, there = found
            self._outcome.notes.append(
                f"this process computes with {name} {here}, and the run with {there}: bits may "
                f"differ for that alone ({remedy(name, there)})"
            )
        if len(set(theirs)) > 1:
            self._outcome.notes.append(
                f"the run's workers had {len(set(theirs))} arithmetics (--arithmetic tell): who "
                "computes a grain may decide its bits"
            )

    @contextmanager
    def _noting(self, judge: Judge, scope: Scope) -> Iterator[None]:
        """Notes how far the audit has come, if it is interrupted."""
        try:
            yield
        except BaseException:
            self._folder.note(self._identity, judge.step or scope.origin.step)
            raise

    @property
    def _folder_of_script(self) -> Path | None:
        """Where the script is started: where it was, if that is still there."""
        kept = Path(self._kept.folder) if self._kept.folder else None
        ours = self._config.command or kept is None or not kept.is_dir()
        return None if ours else kept

    def _environment(self, scope: Scope) -> dict[str, str]:
        given = {
            **ENVIRONMENT,
            **of_no_launch(os.environ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
            **self._kept.variables,
            "ANDON_AUDIT": str(self._folder.order),
            "ANDON_RUN_DIR": str(self._folder.path),
            "ANDON_CHECKPOINT_EVERY": str(self._config.settings.own_checkpoint_every),
            "ANDON_KEEP_CHECKPOINTS": "2",
            "ANDON_SAME_BITS": "1" if scope.exact else "0",
            # The output says what differs; here nobody trains on with it.
            "ANDON_ARITHMETIC": "tell",
            "ANDON_SEED": str(scope.plan.seed),
            "PYTHONUNBUFFERED": "1",
        }
        if scope.checkpoint is not None:
            given["ANDON_RESUME"] = str(scope.checkpoint)
        return given


def _command_of(config: AuditConfig, kept: KeptCommand) -> tuple[str, ...]:
    if config.command:
        return config.command
    if kept.command:
        return kept.command
    why = f" ({kept.left_out})" if kept.left_out else ""
    raise AuditRefused(
        f"the run's folder does not say how its script was started{why}: name its command, "
        f"andon audit {config.run} -- python train.py"
    )


def _refuse_encoding(kept: KeptCommand) -> None:
    if kept.answer_encoding not in ("", "same", "float32"):
        raise AuditRefused(
            f"the run's averages travelled as {kept.answer_encoding} (--answer-encoding), which a "
            "script that runs alone does not round to: such a run can't be audited"
        )


class _Screen:
    """Says how far the audit is."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._draws = shown and sys.stdout.isatty()
        self._next = time.monotonic() + (0.0 if self._draws else _SAY_EVERY_S)
        self._shown_step: int | None = None

    def show(self, step: int, scope: Scope) -> None:
        """Shows the step, now and then."""
        now = time.monotonic()
        if not self._shown or now < self._next or step == self._shown_step:
            return
        self._shown_step = step
        self._next = now + (_DRAW_EVERY_S if self._draws else _SAY_EVERY_S)
        line = f"step {step} of {scope.last}: equal"
        print(f"\r{line}\x1b[K" if self._draws else line, end="" if self._draws else "\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self._draws:
            print("\r\x1b[K", end="")
