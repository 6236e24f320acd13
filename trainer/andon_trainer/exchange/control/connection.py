"""The connection to the coordinator: one control stream after another, each time one is lost."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc

from andon.host.jitter import jittered
from andon.host.logs import LogEvent
from andon.host.tls import TlsError
from andon.protocol.run_settings import Policy
from andon.wire.statuses import details_of
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Joined, Joining
from andon_trainer.errors import JoinRefused, LineLost
from andon_trainer.exchange.channels import tls_trouble
from andon_trainer.exchange.control.control import ControlStream
from andon_trainer.exchange.control.explaining import Explainer
from andon_trainer.exchange.control.heartbeats import ScalarOutbox
from andon_trainer.exchange.path import Inbox
from andon_trainer.timeline import Timeline

__all__ = ["Connection", "ReadFailures"]

log = logging.getLogger(__name__)

_FIRST_PATIENCE_S = 300.0
_FIRST_WAIT_S = 0.05
_GROWTH = 1.5
_LONGEST_WAIT_S = 2.0
_READ_WAITS_S = (0.05, 0.5, 5.0, 15.0, 15.0)
"""After so many streams that could not be read, one more would not be either."""
_STABLE_S = 60.0
"""A stream that was read for so long begins a new row."""
_SERVICE = "service.json"
"""The file in a run's folder in which its service says where it is, and that the run is over."""


class ReadFailures:
    """Streams in a row that this end could not read, for reasons that nobody foresaw.

    Joining again at once would bring the same message, and the same failure, many times a second.
    """

    def __init__(self) -> None:
        """There was none yet."""
        self.in_a_row = 0

    def wait_s(self, failure: Exception | None, lived_s: float = 0.0) -> float | None:
        """How long to wait before the next Join, in seconds; None: it would not help any more.

        Args:
            failure: of the last stream; None: it was read to its end.
            lived_s: for how long it was read.
        """
        if failure is None or lived_s > _STABLE_S:
            self.in_a_row = 0
        if failure is None:
            return 0.0
        if self.in_a_row == len(_READ_WAITS_S):
            return None
        self.in_a_row += 1
        return _READ_WAITS_S[self.in_a_row - 1]


class Connection:
    """One control stream after another. Used by one thread."""

    def __init__(self, config: LineConfig, inbox: Inbox, timeline: Timeline | None = None) -> None:
        """Opens nothing yet."""
        self._timeline = timeline
        self._config = config
        self._inbox = inbox
        self._control: ControlStream | None = None
        self._joined: Joined | None = None
        self.hear: Callable[[Assigned, int], bool] = lambda _assigned, _stream: False
        """Opens listening streams, on the thread that reads the control stream."""
        self.outbox = ScalarOutbox()
        """What the script logged, for whichever stream there is."""
        self._explainer = Explainer()
        self._failures = ReadFailures()
        self._began = 0.0
        """When the present stream was joined, as a monotonic time in seconds."""
        self.incarnation = secrets.randbits(64)
        """Distinguishes this process from another one that wants its slot."""
        self._started_at = _process_began_at()
        self._runs = Path("runs").absolute()
        """Where `andon serve` keeps runs if it was started in the same folder as this process."""
        self.number = 0
        """The present stream's number, from 1."""
        self.greatest_term = 0
        """The greatest term that any coordinator answered with (rule 1)."""

    @property
    def joined(self) -> Joined:
        """The answer to the latest Join."""
        assert self._joined is not None, "not joined yet"
        return self._joined

    @property
    def policy(self) -> Policy:
        """How the line works; before the first Join the default."""
        return Policy() if self._joined is None else self._joined.policy

    @property
    def coordinator_can(self) -> frozenset[str]:
        """The coordinator's capabilities; before the first Join none is known."""
        return frozenset() if self._joined is None else self._joined.capabilities

    @property
    def control(self) -> ControlStream:
        """The present stream."""
        assert self._control is not None, "not joined yet"
        return self._control

    @property
    def run_id(self) -> str:
        """The run that it joined or is to join; empty: whichever is served there."""
        return self._config.run_id if self._joined is None else self._joined.run_id

    @property
    def address(self) -> str:
        """The coordinator's address; its own reducer is there, too."""
        return self._config.address

    @property
    def tls(self) -> Path | None:
        """The folder of this worker's certificates; None: it does not encrypt."""
        return self._config.tls

    @property
    def is_open(self) -> bool:
        """Whether there is a stream, as far as this end knows."""
        return self._control is not None

    @property
    def slot(self) -> int | None:
        """The slot to ask for: the one that it had, else the launcher's."""
        return self._config.launch_slot if self._joined is None else self._joined.worker

    def connect(self, joining: Joining) -> Joined:
        """Joins on a new stream. Tries again, with jittered back-off, as long as that may help.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered for as long as this worker waits.
        """
        # Before anything is opened: a Join has the run's token in it.
        self._refuse_plain_text()
        failure = None if self._control is None else self._control.failure
        self.close()
        self._wait_after(failure, joining)
        patience_s = self._joined.liveness.reconnect_s if self._joined else _FIRST_PATIENCE_S
        deadline, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
        while True:
            least_s = 0.0  # How long the coordinator asked this worker to wait, if it did.
            try:
                self._try(joining)
                break
            except JoinRefused as refusal:
                if not self._may_end(refusal) or time.monotonic() + wait_s > deadline:
                    raise
                awaited, why = f"slot {self.slot}", str(refusal)
                # A slot that the line chose may be a newcomer's now, for good, if that came first
                # after a restart of the coordinator: then the line chooses another.
                joining = replace(joining, launch_slot=self._config.launch_slot)
            except (grpc.RpcError, TlsError) as error:
                self._refuse_if_complete()
                over = time.monotonic() + wait_s > deadline
                awaited = f"a coordinator at {self._config.address}"
                why = self._trouble(error, patient=wait_s < _LONGEST_WAIT_S and not over)
                if why and (over or self._joined is None):
                    raise JoinRefused("tls", why) from None
                if isinstance(error, grpc.RpcError):
                    why = why or error.code().name
                    least_s = details_of(error).wait_s
                if time.monotonic() + wait_s > deadline:
                    raise LineLost(
                        f"no coordinator answered at {self._config.address} for {patience_s:.0f} s "
                        f"({why}): start one with `andon serve`",
                        self._config.address,
                        joining.step,
                    ) from None
            if wait_s == _FIRST_WAIT_S:  # Once, and not for each try.
                text = f"waiting for {awaited} ({why})"
                log.warning(LogEvent("coordinator_awaited", text, why=why))
            # Jittered: all workers of a line lose their coordinator at the same moment.
            time.sleep(max(least_s, jittered(wait_s)))
            wait_s = min(_GROWTH * wait_s, _LONGEST_WAIT_S)
        # A coordinator that lost its journal learns from the next Join which terms were used.
        self.greatest_term = max(self.greatest_term, self.joined.term)
        if self.joined.in_sync and self.joined.head != joining.head:
            raise LineLost(
                "the coordinator calls this worker in sync with a head that it does not have",
                self._config.address,
                joining.step,
            )
        return self.joined

    def _wait_after(self, failure: Exception | None, joining: Joining) -> None:
        """Waits if the last stream could not be read, longer each time.

        Raises:
            LineLost: it is not to be expected that the next one can.
        """
        wait_s = self._failures.wait_s(failure, time.monotonic() - self._began)
        if wait_s is None:
            text = (
                f"what the coordinator at {self._config.address} sends could not be read "
                f"{self._failures.in_a_row + 1} times in a row ({failure!r}): this is a mistake of "
                "Andon's, and its traceback is in this worker's log"
            )
            raise LineLost(text, self._config.address, joining.step) from failure
        if wait_s:
            time.sleep(wait_s)

    def close(self, *, after_s: float = 0.0) -> None:
        """Ends the stream, giving the coordinator up to `after_s` to take what was sent."""
        if self._control is not None:
            self._control.close(after_s=after_s)
            self._control = None

    def _may_end(self, refusal: JoinRefused) -> bool:
        """Whether a refusal may pass: another process has this worker's slot, and may be dead.

        Its Join can arrive late, while this worker is between two streams. The coordinator will
        notice that it is dead.
        """
        return refusal.reason == "slot" and self._joined is not None

    def _trouble(self, error: grpc.RpcError | TlsError, *, patient: bool) -> str:
        """Says what is wrong with certificates, if anything is.

        A newcomer gives up then. A worker that was on the line keeps trying, and asks only once
        it is no longer `patient`: the handshake that finds out takes seconds, and a coordinator
        that restarts is back sooner.
        """
        if patient and self._joined is not None and isinstance(error, grpc.RpcError):
            return ""
        return tls_trouble(error, self._config.address, self.tls)

    def _refuse_if_complete(self) -> None:
        """Ends the search for a coordinator that has ended with the run, as it would have said.

        Raises:
            JoinRefused: the run's folder says so, and this worker was away when all were told.
        """
        for folder in self._folders():
            if _completed_since(folder, self.run_id, self._started_at):
                raise JoinRefused(
                    "complete",
                    f"run {self.run_id or folder.name} is over: its service has ended, and "
                    f"{folder / _SERVICE} says that the run is complete. Nothing is left to do, "
                    "and another run needs another name",
                )

    def _folders(self) -> list[Path]:
        """Where the run's service may have written: its folder, else one that has its name.

        A worker that knows neither looks nowhere: another run may have had the same address.
        """
        if self._config.run_dir is not None:
            return [self._config.run_dir]
        try:
            # Compared and not joined: the name may be what a service said.
            return [each for each in self._runs.iterdir() if each.name == self.run_id]
        except OSError:
            return []

    def _refuse_plain_text(self) -> None:
        """Refuses to send in plain text between hosts, unless the configuration allows it.

        Raises:
            JoinRefused: the line or a neighbour may be on another host, and nothing is encrypted.
        """
        heard = self._config.heard_by_others
        if heard:
            raise JoinRefused.in_the_clear(heard)

    def _try(self, joining: Joining) -> None:
        """Joins, or raises why that did not work this time."""
        self.number += 1
        # Before the stream exists: from here on events of the last one are dropped.
        self._inbox.follow(self.number)
        stream = ControlStream(
            self._config.address,
            self._inbox,
            self.number,
            self.tls,
            outbox=self.outbox,
            timeline=self._timeline,
        )
        stream.shared_dir = self._config.shared_dir
        stream.hear = self.hear
        stream.explainer = self._explainer
        try:
            joined = stream.join(joining)
        except BaseException:
            stream.close()
            raise
        self._joined = replace(joined, run_id=joined.run_id or joining.run_id)
        self._control, self._began = stream, time.monotonic()


def _completed_since(folder: Path, run_id: str, started_at: float) -> bool:
    """Whether the folder's run was completed after `started_at`, by the service that it names.

    A worker that is started after that waits for a service that goes on with the run, if somebody
    starts one: it writes the file anew.
    """
    try:
        told = json.loads((folder / _SERVICE).read_bytes())
        completed_at = float(told.get("complete_at_unix_s", 0.0))
        return completed_at > started_at and run_id in ("", told["run_id"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # There is none, or it is no such file.


def _process_began_at() -> float:
    """When this process began, in seconds since the Unix epoch; now, if it can't be known."""
    try:
        # Field 22, counted behind the name, which may hold anything.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
    return time.time() - age_s
