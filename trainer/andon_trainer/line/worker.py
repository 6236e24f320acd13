"""The worker behind a `Line`: its state and its membership, from joining to leaving.

Theory of operation. `Line` has two kinds of loops above this, prepared and manual. Both need the
same below: a replica that is loaded from a checkpoint or another worker, a membership (on the line
or alone), checkpoints between steps, and an end. The end is the delicate part. A worker may leave
because its loops are done, because it crashed, because SIGTERM came, or because Python exits; the
coordinator is told which, and only a worker whose work is done has its final weights compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.records import Key
from andon.protocol.run_settings import DRAINED, Policy, RunPlan
from andon_trainer.averaging.attesting import can_attest
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Digest, LeaveReport
from andon_trainer.errors import JoinRefused, LineHalted, RunOver
from andon_trainer.hosts.calls import failing_together
from andon_trainer.hosts.group import HostGroup
from andon_trainer.hosts.member import FollowerMember, LeaderMember
from andon_trainer.hosts.opening import agree_on_plan, config_of_host, located_by_leader
from andon_trainer.line_options import given_in, unseen
from andon_trainer.model.layout import ModelPlan, warn_of_rounding
from andon_trainer.place.audit import AuditMember
from andon_trainer.place.candidate import Candidate, refuse_other_options, refuse_other_plan
from andon_trainer.place.member import WorkerMember
from andon_trainer.place.membership import Membership
from andon_trainer.place.position import Position
from andon_trainer.place.solo import SoloMember
from andon_trainer.process.arithmetic import ProcessArithmetic
from andon_trainer.process.device import counters_of, describe, gpu_of
from andon_trainer.process.exits import is_interactive, watch_exit
from andon_trainer.process.launch import WorkerLaunch
from andon_trainer.process.preemption import PreemptionWatch
from andon_trainer.process.stating import write_stated
from andon_trainer.state.checkpoints import WorkerCheckpoints
from andon_trainer.state.footprint import Footprint
from andon_trainer.state.replica import Replica
from andon_trainer.telemetry import Telemetry
from andon_trainer.termination import Termination
from andon_trainer.timeline import Timeline

__all__ = ["Worker"]

log = logging.getLogger(__name__)

_done: list[tuple[str, str]] = []
"""Address and id of each run that this process trained to its end."""


class Worker:
    """One process's part in a run. Used by one thread."""

    def __init__(self, config: LineConfig, device: torch.device) -> None:
        """Opens nothing yet.

        Raises:
            JoinRefused: this process has trained the run to its end already.
            RuntimeError: the configuration wants the same bits, and it is too late for them.
        """
        self.config = config
        self.device = device
        self.arithmetic = ProcessArithmetic() if config.same_bits else None
        """What decides the bits of its results; None: nobody wants the same ones."""
        self.replica = Replica([])
        self.checkpoints = WorkerCheckpoints(config, device)
        self.host: HostGroup | None = None
        """The processes that are one worker together with this one; None: it is a worker alone."""
        self.member: WorkerMember | FollowerMember | None = None
        """Its place in the run: on the line, in its host, or alone; None before it has joined."""
        self.membership: Membership | None = None
        """Its place on the line; None: it is alone, or another process of its host has one."""
        self.crash: BaseException | None = None
        """What ended the script; None if it came to its end, as far as is known."""
        self.pause: Callable[[], None] | None = None
        """Makes the models hold the line's weights, wherever in its loop the script is; None: it
        makes its steps by itself, and nobody else knows where it is."""
        self._launch = WorkerLaunch(config)
        self._launched = config.launch is not None and not config.address
        """Whether rank 0 of this launch serves the line, with the script's options."""
        self._run: RunPlan | None = None
        self._telemetry: Telemetry | None = None
        self._timeline: Timeline | None = None
        self._termination = Termination()
        self._notice: PreemptionWatch | None = None
        self._exit = watch_exit()
        self._left = False
        self._gone = False
        """Whether nothing of this worker is in the process any more."""
        self._compared: tuple[Key | None, Digest] | None = None
        """The head and the weights that the loops ended with, once they were compared."""
        try:
            # Last: an exception that the script does not catch is given its exit code by then.
            _refuse_again(config)
        except JoinRefused as refused:
            self._exit.end_with(refused)
            raise

    @property
    def whole(self) -> WorkerMember | None:
        """Its place, if this process acts for its whole worker; None: another of its host does."""
        return None if isinstance(self.member, FollowerMember) else self.member

    @property
    def assigned(self) -> Assigned | None:
        """The current round; None before there is one."""
        return self.member.position.assigned if self.member else None

    @property
    def stopped(self) -> bool:
        """Whether the line ended the run."""
        return self.member is not None and bool(self.member.position.stop_reason)

    def log_facts(self) -> Mapping[str, object]:
        """The run, the worker and its step, as far as they are known; any thread may ask."""
        member = self.member
        facts: dict[str, object] = {"run": self.config.run_id} if self.config.run_id else {}
        if member is None:
            return facts
        if self.membership is not None:
            facts |= {"run": self.membership.run_id, "worker": member.position.worker}
        return {**facts, "step": member.position.step}

    # ------------------------------------------------------------------ joining

    def begin(self) -> None:
        """Finds out where the line is, and loads the checkpoint that the run goes on from.

        Raises:
            CheckpointRefused: it is damaged, or of other models or optimizers.
            JoinRefused, LineLost: see `WorkerLaunch.locate`.
        """
        config, host = self.config, self.host
        with _no_success():
            located = self._launch.locate(config if host is None else config_of_host(config, host))
        # A host's slot is the line's to choose, but its processes keep theirs until they join.
        self.config = replace(located, launch_slot=config.launch_slot)
        if host is not None:
            # Now: this host's other processes wait for it, and the leader will meet them.
            self._launch.publish()
        self.checkpoints = WorkerCheckpoints(self.config, self.device)
        self.checkpoints.begin(self.replica)

    def join(
        self, plan: ModelPlan, run: RunPlan, capabilities: tuple[str, ...] = ()
    ) -> WorkerMember | FollowerMember:
        """Takes this worker's place: on the line of the configuration, in its host, or alone.

        Args:
            plan: the blocks of its models.
            run: what the script intends.
            capabilities: what its loop can do that not every loop can.

        Raises:
            CheckpointRefused: the checkpoint is of another run.
            JoinRefused: the line does not accept this worker.
            LineLost: no coordinator answers.
        """
        self.checkpoints.check(run)
        self._run = run
        self.replica.mark(plan)
        stated = () if self.arithmetic is None else self.arithmetic.stated(self.device)
        host = self.host
        if host is not None:
            agree_on_plan(host, plan.layout, run, stated)
            if host.rank:
                return self._follow(host)
            self.config = config_of_host(self.config, host)
            with failing_together(host):
                return self._take_place(plan, run, stated, capabilities)
        return self._take_place(plan, run, stated, capabilities)

    def _follow(self, host: HostGroup) -> FollowerMember:
        """Takes a follower's place in its host."""
        self.member = member = FollowerMember(host, self.replica)
        # The leader leaves once its step is over, and tells this process.
        self._termination.install(member.ask_to_leave)
        self.config = located_by_leader(self.config, member.join())
        return member

    def _take_place(
        self, plan: ModelPlan, run: RunPlan, stated: Arithmetic, capabilities: tuple[str, ...]
    ) -> WorkerMember:
        """Takes a worker's place on the line, or alone."""
        self._launch.publish()  # Here: it begins a thread, and by now the loaders have forked.
        self._open_timeline()
        config = self.config
        self.checkpoints.takes_up(stated)
        candidate = Candidate(
            layout=plan.layout,
            plan=run,
            replica=self.replica,
            device=describe(self.device),
            origin=self.checkpoints.origin,
            arithmetic=stated,
            restore=None
            if config.run_dir is None
            else partial(self.checkpoints.restore, self.replica),
            capabilities=capabilities,
        )
        if config.audit is not None:
            self.member = AuditMember(
                config.audit,
                candidate,
                self.replica,
                self.checkpoints.end,
                footprint=lambda: Footprint(self.replica.modules, self.device).since,
                can_attest=can_attest(),
            )
            return self.member
        if config.solo:
            if config.line_options is not None:
                log.info("alone there is no line: line_options have no effect")
            if stated and config.run_dir is not None:
                write_stated(config.run_dir, stated)
            self.member = SoloMember(run, self.checkpoints.origin, self._timeline)
            return self.member
        self._telemetry = Telemetry(config, self._timeline, gpu_of(self.device))
        self.membership = membership = Membership(config, candidate, self._telemetry)
        membership.on_last = self._keep_state
        leader = None
        if self.host is not None:
            leader = LeaderMember(self.host, membership, self.replica)
        self.member = leader or membership
        # Before joining: a SIGTERM that comes while this worker waits for its weights must end the
        # wait, and `ask_to_leave` is what does that.
        self._termination.install(membership.ask_to_leave)
        if config.preemption_notice:
            self._notice = PreemptionWatch(config.preemption_notice, self._termination.ask)
        with _no_success():
            membership.join()
        refuse_other_plan(run, membership.plan)
        self._compare_options(config, membership.policy)
        if leader is not None:
            leader.joined((config.address, membership.run_id, config.run_dir))
        warn_of_rounding(plan.layout)
        return self.member

    def _compare_options(self, config: LineConfig, policy: Policy) -> None:
        """Compares what the script asks of the line with what the line is, as far as is known."""
        options = config.line_options
        if options is None:
            return
        refuse_other_options(given_in(options), options.policy, policy, config.address)
        if not self._launched and (names := unseen(options)):
            log.warning(
                "the line at %s was not started by this script: it decides by itself about %s, "
                "whatever line_options say",
                config.address,
                ", ".join(names),
            )

    def _open_timeline(self) -> None:
        """Begins to record if a trace is wanted."""
        config = self.config
        if config.trace is not None:
            counters, notes = counters_of(self.device)
            self._timeline = Timeline(
                config.trace, run_id=config.run_id, counters=counters, notes=notes
            )

    def plan_run(self, global_batch: int, **data: Any) -> RunPlan:
        """What the script intends; `data` is what is known of its training set."""
        config = self.config
        return RunPlan(
            global_batch=global_batch, seed=config.seed, total_steps=config.total_steps, **data
        )

    @property
    def endless(self) -> bool:
        """Whether the script has joined without saying after how many steps it ends."""
        return self._run is not None and self._run.total_steps is None

    # ------------------------------------------------------------------ between steps

    def between_steps(self, *, over: bool = False) -> None:
        """Writes the checkpoint that the last commit made due; `over`: no step will follow."""
        assert self._run is not None
        assert self.member is not None
        self.checkpoints.restore_generators(self.member.position.worker)
        if (member := self.whole) is not None:
            self.checkpoints.between_steps(self.replica, member, self._run, over=over)

    def _keep_state(self) -> None:
        """Writes the line's state, which nobody else holds, before this worker leaves."""
        member = self.whole
        assert member is not None
        assert self._run is not None
        if self.pause is not None:
            self.pause()
        self.checkpoints.keep(self.replica, member, self._run, paused=self.pause is not None)

    def compare_ends(self) -> None:
        """Compares the final weights with all others', while the others are still there.

        Raises:
            LineHalted: they differ.
        """
        assert self.member is not None
        # Once a head: both the end of `epochs` and `close` come here.
        here = self.member.position
        if self._compared is None or self._compared[0] != here.head:
            digest = self.replica.weights(here.coordinator_can)
            self.member.compare(digest)
            self._compared = self.member.position.head, digest

    # ------------------------------------------------------------------ leaving

    @property
    def is_leaving_cleanly(self) -> bool:
        """Whether nothing went wrong, and this worker has not left yet."""
        return self.crash is None and not self._left

    def ask_to_leave(self, why: str) -> None:
        """Makes this worker leave once its step is over, as SIGTERM does; any thread may ask.

        A loop that is alone waits for nothing: whoever runs it ends it, by raising Terminated.
        """
        self._termination.ask(why)

    def note_failure(self, error: BaseException) -> None:
        """Notes what ended the script inside `with Line() as line:`."""
        if self._termination.wanted or (isinstance(error, SystemExit) and not error.code):
            return  # SIGTERM's own exit, or a good one.
        self.crash = self.crash or error

    def note_exit(self, *, done: bool) -> None:
        """Finds out, as Python exits, whether the script came to its end.

        Args:
            done: whether the script's work is known to be done.
        """
        self.crash = self.crash or self._exit.failure(done=done)
        if isinstance(self.crash, SystemExit) and self._termination.wanted:
            self.crash = None  # It is SIGTERM's own exit, and no failure.

    def finish(self) -> None:
        """Compares the final weights, if this worker leaves with its work done.

        A checkpoint that is still being written comes first.

        Raises:
            LineHalted: they differ, or it can't be written.
        """
        try:
            if self.member is None or self._left or not self._ends_well:
                return
            assert self._run is not None
            if (member := self.whole) is not None:
                self.checkpoints.settle(self.replica, member, self._run)
            if self.config.audit is not None or not isinstance(self.member, SoloMember):
                self.compare_ends()
        except BaseException as error:
            self.crash = error  # `leave` reports it.
            raise

    def leave(self) -> None:
        """Leaves the line, saying why, and ends the telemetry; a second call does nothing."""
        left, self._left = self._left, True
        if (member := self.whole) is not None and not left:
            # First: the line is told of it as this worker leaves, and the process may end after it.
            self.checkpoints.end(member)
        if self.membership is not None and not left:
            self.membership.leave(self._departure(self.membership.position))
            self._note_done(self.membership.run_id)
            self.replica.rooms.let_go()
        elif isinstance(self.member, FollowerMember) and not left:
            self._note_done(self.config.run_id)
        if self.host is not None:
            self.host.close()
        if self._telemetry is not None:
            self._telemetry.close()
        if self._timeline is not None:
            self._timeline.close()
        self._launch.leaving(done=self._ends_well)
        if self._notice is not None:
            self._notice.stop()
        self._termination.remove()
        self.checkpoints.close()
        if not self._gone:
            self._gone = True
            if self.arithmetic is not None:
                self.arithmetic.restore()
            self._exit.end_with(self.crash)

    def _note_done(self, run_id: str) -> None:
        if self._ends_well:
            _done.append((self.config.address, run_id))

    @property
    def _ends_well(self) -> bool:
        """Whether the run is done, as far as this worker is concerned."""
        terminated = self._termination.wanted and not self.stopped
        return isinstance(self.crash, RunOver) or (self.crash is None and not terminated)

    def _departure(self, here: Position) -> LeaveReport:
        crash = self.crash
        if crash is None and self._termination.wanted and not here.stop_reason:
            return LeaveReport(
                reason="INTERRUPTED", message=self._termination.why, final_step=here.step
            )
        if crash is None or isinstance(crash, RunOver):
            return LeaveReport(
                reason="DRAINED" if here.stop_reason == DRAINED else "COMPLETE",
                final_step=here.step,
                head=here.head,
                digest=(
                    self._compared[1]
                    if self._compared
                    else self.replica.weights(here.coordinator_can)
                ),
            )
        reason = "FAILED"
        if isinstance(crash, LineHalted):
            reason = "HALTED"
        elif isinstance(crash, KeyboardInterrupt):
            reason = "INTERRUPTED"
        return LeaveReport(
            reason=reason,
            message=str(crash),
            final_step=here.step,
            error_type=type(crash).__name__,
        )


def _refuse_again(config: LineConfig) -> None:
    """Raises JoinRefused if this process has trained the configuration's run to its end.

    At once: the others have left it too, so that nobody would answer.
    """
    for address, run_id in _done:
        # A person in a session may have started another service at the same port.
        same_place = not (config.run_id or is_interactive()) and config.address == address
        if same_place or config.run_id == run_id:
            raise JoinRefused.another_run(run_id)


@contextmanager
def _no_success() -> Iterator[None]:
    """Takes care that a process does not meet as a success that a run is over which it trained.

    Its script wants another run, and would end with code 0 in the middle. That a later run is
    over, which others have trained meanwhile, is what it says.
    """
    try:
        yield
    except JoinRefused as refused:
        for _, run_id in _done if refused.reason == "complete" else ():
            # Only its text tells of which run a refusal is.
            if str(refused).startswith(f"run {run_id} "):
                raise JoinRefused.another_run(run_id) from refused
        raise
