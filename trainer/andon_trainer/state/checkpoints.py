"""Checkpoints: when a run writes one, which it keeps, and what it goes on from.

Theory of operation. The worker that the line made its writer writes between two steps. That is a
barrier: no round opens before every worker in sync has asked for work, the writer asks when it has
written, and all workers in sync hold the weights of the same record meanwhile. So the state on disk
is everybody's, at one commit.

A checkpoint makes older ones superfluous only once a step was committed on top of it: until then
nothing is removed. A halted line commits nothing, so nothing is removed while it is halted.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import torch

from andon.host.manifest import CheckpointFacts, checkpoint_folder, checkpoints_in, step_of
from andon.protocol.run_settings import RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.errors import CheckpointRefused
from andon_trainer.member import Member
from andon_trainer.state import rng
from andon_trainer.state.checkpoint_files import remove_checkpoint
from andon_trainer.state.replica import Replica

__all__ = ["Checkpoints"]

_TOTALS = ("total_steps", "total_epochs")


class Checkpoints:
    """A run's checkpoints, as one worker reads and writes them. Used by one thread."""

    def __init__(self, config: LineConfig, device: torch.device) -> None:
        """Touches nothing yet."""
        self._config = config
        self._device = device
        self._began: dict[str, str] = {}
        self._generators: dict[str, Any] = {}
        """What is still to be restored."""
        self._wanted = False
        self._written = 0
        self._unproven: int | None = None
        """The step of a checkpoint on top of which nothing was committed yet."""
        self.origin: CheckpointFacts | None = None
        """Where the checkpoint stands that this worker goes on from."""
        self.last: Path | None = None
        """The folder that was written last."""

    def begin(self, replica: Replica) -> None:
        """Loads what the run is resumed from, and listens to SIGUSR1.

        Raises:
            CheckpointRefused: it is damaged, or of other models or optimizers.
        """
        began = rng.digests(rng.capture(self._device))
        self._began = began
        if self._config.run_dir is not None:
            self._listen()
        folder = self._config.resume
        if folder is None:
            return
        self.origin, states = replica.load(folder)
        self._written = self.origin.step
        everything = not self._config.launch_slot
        self._generators = {
            name: state
            for name, state in states["now"].items()
            if everything or states["began"].get(name) == began.get(name)
        }

    def check(self, plan: RunPlan) -> None:
        """Refuses a script that means another run; how long it lasts may be new.

        Raises:
            CheckpointRefused: the batch, the samples, their number or the seed differs.
        """
        if self.origin is None:
            return
        for name in RunPlan.__dataclass_fields__:
            mine, theirs = getattr(plan, name), getattr(self.origin.plan, name)
            if name == "data_digest" and mine and theirs and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run with other samples, in as "
                    "many positions: seed what splits, shuffles or makes the training set, as in "
                    "random_split(data, lengths, torch.Generator().manual_seed(0)); "
                    "ANDON_CHECK_DATA=0 if they are meant to differ"
                )
            if name not in (*_TOTALS, "data_digest") and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run whose {name} is {theirs}, "
                    f"and the script's is {mine}: positions would not mean the same samples"
                )

    def between_steps(
        self, replica: Replica, member: Member, plan: RunPlan, *, over: bool = False
    ) -> None:
        """Does what is due now that a step is over and the next one is not asked for yet.

        `over`: the script wants no further step.

        Raises:
            LineHalted: a checkpoint could not be written, and this worker raises.
        """
        if self._generators:
            states, self._generators = self._generators, {}
            rng.restore(states, self._device)
        if self._config.run_dir is None:
            return
        if self._unproven is not None and member.step > self._unproven:
            self._rotate(self._config.run_dir, self._unproven)
            self._unproven = None
        assigned = member.assigned
        if assigned is None or assigned.key != member.head:
            return  # this worker was not part of the last commit
        every, step = self._config.checkpoint_every, member.step
        # Whoever goes on with a run goes on from where it ended.
        # One that another writer missed, since it died, is made up for.
        last = max(self._written, assigned.checkpoint_step)
        passed = every and step // every > last // every
        due = self._wanted or passed or (every and (member.stop_reason or over))
        if due and assigned.writes_checkpoint and step != self._written:
            self._write(replica, member, plan)
        self._wanted = False

    def _write(self, replica: Replica, member: Member, plan: RunPlan) -> None:
        """Writes the checkpoint of the last commit; while that fails the line is halted."""
        run_dir = self._config.run_dir
        assert run_dir is not None
        assert member.head is not None
        member.show("BUSY", "writing a checkpoint")
        facts = CheckpointFacts(
            head=member.head,
            step=member.step,
            cursor=member.cursor,
            digest=replica.digest().hex(),
            plan=plan,
        )
        folder = checkpoint_folder(run_dir, member.step)
        generators = {"now": rng.capture(self._device), "began": self._began}
        while True:
            try:
                replica.save(folder, facts, generators)
            except OSError as error:
                member.stop_line("CHECKPOINT", f"{error.strerror or error} ({folder})")
            except (TypeError, ValueError) as error:
                # What was registered could be kept then, and has something in it now that can't.
                member.stop_line("CHECKPOINT", f"{error} ({folder})")
            else:
                break
        self.last = folder
        self._written = self._unproven = member.step
        member.wrote(member.step, str(folder))
        member.show("IDLE")

    def _rotate(self, run_dir: Path, newest: int) -> None:
        """Keeps the last few up to `newest`; newer ones are of a history that was rolled back."""
        kept = [folder for folder in checkpoints_in(run_dir) if step_of(folder) <= newest]
        for folder in kept[self._config.keep_checkpoints :]:
            remove_checkpoint(folder)

    def _listen(self) -> None:
        """Takes SIGUSR1 as the wish for a checkpoint, unless the script has a use for it."""
        if threading.current_thread() is not threading.main_thread():
            return  # only there may handlers be set
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGUSR1, lambda _number, _frame: self._want())

    def _want(self) -> None:
        self._wanted = True
