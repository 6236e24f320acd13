"""A run's checkpoints: when one is written, which are kept, and what a run resumes from.

Theory of operation. The line names one worker as its writer, and that worker writes between two
steps. This works like a barrier: no round opens before every worker in sync has asked for work, and
the writer asks only after it has written. Meanwhile all workers in sync hold the weights of the
same record. So what is on disk is every worker's state, at one commit.

Older checkpoints are removed only once a step was committed on top of the newest one: until then
nobody knows whether training can go on from it. A halted line commits nothing, so nothing is
removed while it is halted.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from andon.host.manifest import CheckpointFacts, checkpoint_folder, checkpoints_in, step_of
from andon.protocol.run_settings import RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.errors import CheckpointRefused
from andon_trainer.place.member import RunMember
from andon_trainer.state import rng
from andon_trainer.state.checkpoint_files import remove_checkpoint
from andon_trainer.state.replica import Replica

__all__ = ["WorkerCheckpoints"]

_TOTALS = ("total_steps", "total_epochs")


class WorkerCheckpoints:
    """A run's checkpoints, as one worker reads and writes them. Used by one thread."""

    def __init__(self, config: LineConfig, device: torch.device) -> None:
        """Touches no file yet."""
        self._config = config
        self._device = device
        self._began: dict[str, str] = {}
        """Digests of the random generators when this worker began."""
        self._generators: dict[str, Any] = {}
        """States of random generators that are still to be restored."""
        self._alike: set[str] = set()
        """Names of generators that began here as they did where the checkpoint was written."""
        self._requested = False
        """Whether SIGUSR1, or a best evaluation, asked for a checkpoint."""
        self._best: int | None = None
        """The step of the checkpoint to keep as the best."""
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        """What SIGUSR1 did before this worker listened for it."""
        self._written = 0
        """The step of the last checkpoint that this worker wrote or resumed from."""
        self._unproven: int | None = None
        """The step of a checkpoint on top of which nothing was committed yet."""
        self.origin: CheckpointFacts | None = None
        """The facts of the checkpoint that this worker resumed from."""
        self.last: Path | None = None
        """The folder of the last checkpoint that this worker wrote."""

    def begin(self, replica: Replica) -> None:
        """Loads the checkpoint that the run resumes from, if any, and listens for SIGUSR1.

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
        self._generators = dict(states["now"])
        self._alike = {name for name in began if states["began"].get(name) == began[name]}

    def check(self, plan: RunPlan) -> None:
        """Refuses a script that describes another run than its checkpoint; its length may differ.

        Raises:
            CheckpointRefused: the batch, the samples, their number or the seed differs.
        """
        if self.origin is None:
            return
        for name in RunPlan.__dataclass_fields__:
            mine, theirs = getattr(plan, name), getattr(self.origin.plan, name)
            if name == "data_digest" and mine and theirs and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run with other samples, though "
                    "with the same number of them: seed what splits, shuffles or makes the "
                    "training set, as in random_split(data, lengths, "
                    "torch.Generator().manual_seed(0)); set ANDON_CHECK_DATA=0 if they are meant "
                    "to differ"
                )
            if name not in (*_TOTALS, "data_digest") and mine != theirs:
                raise CheckpointRefused(
                    f"the checkpoint {self._config.resume} is of a run whose {name} is {theirs}, "
                    f"and the script's is {mine}: positions would not mean the same samples. Use "
                    f"{theirs} again, or start a new run without --resume"
                )

    def between_steps(
        self, replica: Replica, member: RunMember, plan: RunPlan, *, over: bool = False
    ) -> None:
        """Writes a checkpoint if one is due; call it after a step, before the next is asked for.

        Args:
            replica: the state to write.
            member: this worker's membership, which says whether it is the writer.
            plan: the run's.
            over: whether the script wants no further step.

        Raises:
            LineHalted: a checkpoint could not be written, and this worker raises.
        """
        if self._generators:
            # Here, and not in `begin`: numbers drawn between loading and the first step (an
            # evaluation, a model's weights) are no part of the checkpoint's history.
            states, self._generators = self._generators, {}
            # See `rng`: slot 0, or a worker that is alone, continues rank 0's numbers. The others
            # take over only generators that all workers had seeded alike. Without a launcher's slot
            # the line chooses it, so it is known only now.
            given = self._config.launch_slot
            if member.position.worker if given is None else given:
                states = {name: state for name, state in states.items() if name in self._alike}
            rng.restore(states, self._device)
        if self._config.run_dir is None:
            return
        here = member.position
        if self._unproven is not None and here.step > self._unproven:
            self._rotate(self._config.run_dir, self._unproven)
            self._unproven = None
        assigned = here.assigned
        if assigned is None or assigned.key != here.head:
            return  # This worker had no part in the last commit.
        every, step = self._config.checkpoint_every, here.step
        if self._written > step:
            self._written = 0  # The line went back: what was written then is of no use any more.
        # The line knows the newest checkpoint of any worker. If the writer died before its own was
        # written, the next writer makes up for it here, at a step that is no multiple of `every`.
        last = max(self._written, assigned.checkpoint_step)
        passed = every and step // every > last // every
        # The last step always gets one, so that a run that ended can be resumed from its end.
        due = self._requested or passed or (every and (here.stop_reason or over))
        writes = assigned.writes_checkpoint and not assigned.attends
        if due and writes and step != self._written:
            self._write(replica, member, plan)
        self._requested = False

    def _write(self, replica: Replica, member: RunMember, plan: RunPlan) -> None:
        """Writes the checkpoint of the last commit; while that fails the line is halted."""
        run_dir = self._config.run_dir
        assert run_dir is not None
        here = member.position
        assert here.head is not None
        member.talk.show("BUSY", "writing a checkpoint")
        began = time.perf_counter()
        facts = CheckpointFacts(
            head=here.head,
            step=here.step,
            cursor=here.cursor,
            digest=replica.digest().hex(),
            plan=plan,
            pacing=here.pacing,
        )
        folder = checkpoint_folder(run_dir, here.step)
        generators = {"now": rng.capture(self._device), "began": self._began}
        while True:
            try:
                replica.save(folder, facts, generators)
                self._name_best(folder, here.step)
            except OSError as error:
                # Returns once an operator has answered: then it is tried again.
                member.stop_line("CHECKPOINT", f"{error.strerror or error} ({folder})")
            except (TypeError, ValueError) as error:
                # `register` checked the state. It has something in it now that can't be kept.
                member.stop_line("CHECKPOINT", f"{error} ({folder})")
            else:
                break
        self.last = folder
        self._written = self._unproven = here.step
        member.talk.wrote(here.step, str(folder))
        if member.timeline is not None:
            member.timeline.span("checkpoint", began)
        member.talk.show("IDLE")

    def _rotate(self, run_dir: Path, newest: int) -> None:
        """Removes all but the last few checkpoints up to step `newest`.

        Those of later steps stay: they belong to a history that was rolled back.
        """
        kept = [folder for folder in checkpoints_in(run_dir) if step_of(folder) <= newest]
        for folder in kept[self._config.keep_checkpoints :]:
            if step_of(folder) != self._best:
                remove_checkpoint(folder)

    def keep_best(self, step: int) -> None:
        """Has the checkpoint of this step written, and kept until there is a better one.

        Its folder is what `checkpoints/best` leads to. A run without a folder keeps none.
        """
        run_dir, self._best = self._config.run_dir, step
        if run_dir is None:
            return
        if step == self._written:  # By this worker, before it was known to be the best.
            self._name_best(checkpoint_folder(run_dir, step), step)
        else:
            self._requested = True

    def _name_best(self, folder: Path, step: int) -> None:
        """Makes the link `best` lead to the folder, if it is that of the best step."""
        if step != self._best:
            return
        link = folder.with_name("best")
        new = folder.with_name("best.new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(link)  # At once: whoever follows the link finds the old one or the new one.

    def _listen(self) -> None:
        """Writes a checkpoint at the next step on SIGUSR1, unless the script uses that signal."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python sets signal handlers in the main thread only.
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = signal.signal(signal.SIGUSR1, self._request)

    def close(self) -> None:
        """Stops listening for SIGUSR1; a second call does nothing."""
        if self._previous is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) == self._request:
            signal.signal(signal.SIGUSR1, self._previous)
        self._previous = None

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True
