"""The worker's settings: the only place that reads the environment.

Each field of `LineConfig` is one setting. Its metadata names the environment variable that it comes
from and how the variable's text is read; its docstring is what the reference of settings says. An
argument of `Line` overrides the variable, which overrides the default. A variable that is set to
nothing counts as unset.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from andon.host.connections import connections_of
from andon.host.logs import LogFormat
from andon.host.manifest import checkpoint_folder, newest_whole
from andon.host.notice_place import notice_place
from andon.host.run_token import read_token
from andon.host.shared_dir import DEFAULT_SHARED_DIR, shared_dir_of
from andon.host.tls import host_of, is_loopback
from andon.host.web_names import listed_names
from andon.protocol.arithmetic import ArithmeticRule
from andon.protocol.capabilities import CONTROL_SOCKET, EXPLAINS, PROBE, WORKER_CAPABILITIES
from andon.protocol.ring import RING_CAPABILITY
from andon_trainer.launchers import (
    LaunchStore,
    place_in_launch,
    refuse_to_be_many,
    store_of_launch,
    whole_number,
)
from andon_trainer.line_options import LineSchema

__all__ = ["LineConfig", "endpoint_of"]

_ON_HALT = ("raise", "wait")
_ARITHMETIC = tuple(each.value for each in ArithmeticRule)
_LOG_FORMATS = get_args(LogFormat)
_LOG_TO = ("", "csv", "tensorboard")
_OF_AN_AUDIT = (
    *("address", "run_id", "run_dir", "resume", "checkpoint_every", "keep_checkpoints"),
    *("spare", "trace", "log_to", "arithmetic"),
)
"""Settings that `andon audit` chooses, whatever the script says."""


def _text(_variable: str, text: str) -> str:
    return text


def _path(_variable: str, text: str) -> Path:
    return Path(text)


def _positive(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable} must be a number, not {text!r}: unset it") from None


def _switch(variable: str, text: str) -> bool:
    word = text.lower()
    if word not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"{variable} must be 1 or 0, not {text!r}")
    return word in ("1", "true", "yes", "on")


def _connections(variable: str, text: str) -> int | None:
    try:
        return connections_of(text)
    except ValueError as error:
        raise ValueError(f"{variable} {error}") from None


def _shared_dir(_variable: str, text: str) -> Path | None:
    return shared_dir_of(text)


def _notice(setting: str, text: str) -> str:
    try:
        return notice_place(text)
    except ValueError as error:
        raise ValueError(f"{setting} {error}") from None


def _from(variable: str, read: Callable[[str, str], Any] = _text) -> dict[str, Any]:
    """A field's metadata: its environment variable; `read` gets the variable's name and text."""
    return {"variable": variable, "read": read}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig:
    """One worker's configuration: an argument, else the environment variable, else the default."""

    address: str = field(default="", metadata=_from("ANDON_ADDRESS"))
    """The coordinator, as host:port. Empty: the worker is solo, or the launch's rank 0 serves."""
    run_id: str = field(default="", metadata=_from("ANDON_RUN_ID"))
    """The run to join. Empty: the run that is served at the address."""
    token: bytes = field(default=b"", repr=False, metadata={"variable": "ANDON_TOKEN_FILE"})
    """The run's token, if the line asks for one: a file, or its text in `ANDON_TOKEN`."""
    tls: Path | None = field(default=None, metadata=_from("ANDON_TLS_DIR", _path))
    """Folder of this worker's certificates. Default: nothing is encrypted."""
    insecure: bool = field(default=False, metadata=_from("ANDON_INSECURE", _switch))
    """Whether this worker may talk to other hosts without encryption."""
    on_halt: str = field(default="raise", metadata=_from("ANDON_ON_HALT"))
    """What to do when the line stops: `raise` LineHalted, or `wait` for the operator's answer."""
    log_format: LogFormat = field(default="text", metadata=_from("ANDON_LOG_FORMAT"))
    """Write this process's logs as `text`, or as `json` with one object a line."""
    seed: int = field(default=0, metadata=_from("ANDON_SEED", whole_number))
    """Seed of the sample order, 64 bits; the same on all workers."""
    launch_slot: int | None = field(default=None, metadata=_from("RANK", whole_number))
    """The slot that the launcher gave this worker."""
    launch_size: int = field(default=1, metadata=_from("WORLD_SIZE", whole_number))
    """Number of workers that the launcher started."""
    local_rank: int | None = field(default=None, metadata=_from("LOCAL_RANK", whole_number))
    """This worker's number on its host; picks the GPU. Default: where a worker on a line sees
    several GPUs, it claims one that no other worker of its host has."""
    run_dir: Path | None = field(default=None, metadata=_from("ANDON_RUN_DIR", _path))
    """Folder of the run's files. Default: the run keeps none."""
    checkpoint_every: int = field(default=0, metadata=_from("ANDON_CHECKPOINT_EVERY", whole_number))
    """Steps between two checkpoints, which one worker writes; 0: none."""
    keep_checkpoints: int = field(default=3, metadata=_from("ANDON_KEEP_CHECKPOINTS", whole_number))
    """Number of checkpoints to keep, the newest ones."""
    resume: Path | None = field(default=None, metadata=_from("ANDON_RESUME", _path))
    """Folder of the checkpoint to resume from. `latest`: the newest whole one of the run's folder,
    or a new run if there is none. Default: a new run."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1`. Empty: CUDA if there is a GPU, else the CPU."""
    check_data: bool = field(default=True, metadata=_from("ANDON_CHECK_DATA", _switch))
    """Whether workers compare digests of their training sets when they join."""
    same_bits: bool = field(default=False, metadata=_from("ANDON_SAME_BITS", _switch))
    """Whether the weights have the same bits on any number of workers, whoever of them is lost. The
    same on all workers; `prepare` needs a `micro_batch_size` then."""
    arithmetic: str = field(default="require", metadata=_from("ANDON_ARITHMETIC"))
    """With `same_bits`: refuse a checkpoint whose processor, versions or threads differ from this
    worker's (`require`), or log a warning (`tell`). The line has a setting of its own for workers.
    """
    max_overflows: int = field(default=16, metadata=_from("ANDON_MAX_OVERFLOWS", whole_number))
    """Steps in a row whose scaled gradients may overflow, if the script prepares a GradScaler; the
    next one halts the line. The same on all workers."""
    line_options: LineSchema | None = None
    """Of the line that a launch's rank 0 serves: `andon_coordinator.config.LineOptions`, whose
    fields are flags of `andon serve`. A line that is somebody else's must have the same. Default:
    the environment decides."""
    total_steps: int | None = None
    """Steps after which the run ends. Default: the script decides."""
    speed_hint: float | None = field(default=None, metadata=_from("ANDON_SPEED_HINT", _positive))
    """How fast this worker is, compared with the others, until the line has measured it."""
    spare: bool = field(default=False, metadata=_from("ANDON_SPARE", _switch))
    """Whether this worker is a spare: it follows the line, and computes nothing until it takes the
    place of a worker that was lost."""
    preemption_notice: str = field(default="", metadata=_from("ANDON_PREEMPTION_NOTICE", _notice))
    """What tells that this machine is about to go: a file that appears, or an http or https URL
    that answers 200 with a text. The worker then leaves in order. Default: nothing is watched."""
    notice_grace_s: float = field(default=25.0, metadata=_from("ANDON_NOTICE_GRACE", _positive))
    """Seconds that a worker which is to leave waits until the line has all that it computed. After
    that it leaves anyway."""
    metrics_bind: str = field(default="127.0.0.1", metadata=_from("ANDON_METRICS_BIND"))
    """Where this worker's metrics are served: a host (on any free port), host:port, or `off`."""
    metrics_hosts: str = field(default="", metadata=_from("ANDON_METRICS_HOSTS"))
    """Names, separated by commas, under which these metrics may be asked for; this host's name and
    all addresses always may."""
    metrics_token_file: Path | None = field(
        default=None, metadata=_from("ANDON_METRICS_TOKEN_FILE", _path)
    )
    """The file with a token that Prometheus has to show. Default: it shows none."""
    shared_dir: Path | None = field(
        default=DEFAULT_SHARED_DIR, metadata=_from("ANDON_SHARED_DIR", _shared_dir)
    )
    """Folder for memory that is shared with a reducer on this host; `off` shares none."""
    tcp: bool = field(default=True, metadata=_from("ANDON_TCP", _switch))
    """Whether gradients may go over TCP lanes beside gRPC, where the other end offers them."""
    connections: int | None = field(default=None, metadata=_from("ANDON_CONNECTIONS", _connections))
    """Connections of a TCP lane to a reducer each way, 1 to 16, if the reducer takes as many;
    `auto` leaves it to the line, whose default is as many as raise the rate."""
    ring_bind: str = field(default="", metadata=_from("ANDON_RING_BIND"))
    """Where this worker listens for its neighbour in a ring: a host (on any free port), host:port,
    or `off`, which joins no ring. Empty: loopback if the coordinator is there, else the address
    from which this machine reaches it."""
    log_to: str = field(default="", metadata=_from("ANDON_LOG_TO"))
    """Where `line.log` also writes to, in the run's folder: `csv` or `tensorboard`. Empty: a worker
    that is alone writes `csv` if the run has a folder, a worker on a line nothing."""
    trace: Path | None = field(default=None, metadata=_from("ANDON_TRACE", _path))
    """Record what this worker does: its part of the trace FILE goes into the folder `FILE.parts`.
    Default: nothing is recorded."""
    audit: Path | None = field(default=None, metadata=_from("ANDON_AUDIT", _path))
    """Recompute the steps that this file names, alone; `andon audit` sets it."""
    checksums: bool = True
    """Whether chunks get checksums where both ends can; False is for measuring what they cost."""
    launch: LaunchStore | None = None
    """Where rank 0 says the line's address; set under torchrun and the like without an address."""
    andon_run: bool = False
    """Whether `andon run` started this process."""

    def __post_init__(self) -> None:
        """Refuses values that are invalid or contradict each other."""
        for name in ("tls", "run_dir", "resume", "trace", "metrics_token_file"):
            if isinstance(value := getattr(self, name), str):  # From a script.
                object.__setattr__(self, name, Path(value))
        if isinstance(self.shared_dir, str):  # Likewise: a folder, or `off`.
            object.__setattr__(self, "shared_dir", shared_dir_of(self.shared_dir))
        self._check_words()
        for name, least in (("checkpoint_every", 0), ("keep_checkpoints", 1), ("max_overflows", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")
        if self.speed_hint is not None and not 0 < self.speed_hint < math.inf:
            raise ValueError(f"speed_hint must be a number above 0, not {self.speed_hint}")
        if self.checkpoint_every and not self._has_folder:
            raise ValueError(
                "checkpoint_every needs a folder to write to: pass run_dir, or start the script "
                "with `andon run`"
            )
        self._check_notice()
        self._check_log_to()
        _ = self.metrics_endpoint
        try:
            listed_names(self.metrics_hosts)
        except ValueError as error:
            raise ValueError(f"metrics_hosts (ANDON_METRICS_HOSTS) {error}") from error
        if self.ring_bind not in ("", "off"):
            endpoint_of("ring_bind (ANDON_RING_BIND)", self.ring_bind)

    def _check_words(self) -> None:
        if self.line_options is not None and self.line_options.contradiction:
            raise ValueError(f"line_options: {self.line_options.contradiction}")
        for name, words in (
            ("on_halt", _ON_HALT),
            ("log_format", _LOG_FORMATS),
            ("arithmetic", _ARITHMETIC),
        ):
            if (word := getattr(self, name)) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, not {word!r}")

    def _check_notice(self) -> None:
        _notice("preemption_notice", self.preemption_notice)
        if not 0 <= self.notice_grace_s < math.inf:
            raise ValueError(f"notice_grace_s must be 0 or more, not {self.notice_grace_s}")

    def _check_log_to(self) -> None:
        if self.log_to not in _LOG_TO:
            raise ValueError(f"log_to must be csv or tensorboard, not {self.log_to!r}")
        if self.log_to and not self._has_folder:
            raise ValueError(
                "log_to needs a folder to write to: pass run_dir, or start the script with "
                "`andon run`"
            )

    @property
    def _has_folder(self) -> bool:
        """Whether the run has a folder: rank 0 of a launch will say which."""
        return self.run_dir is not None or self.launch is not None

    @property
    def solo(self) -> bool:
        """Whether there is no line to join."""
        return not self.address and self.launch is None

    @property
    def on_its_own(self) -> bool:
        """Whether there is nothing to compare data with: no other worker, and no checkpoint."""
        return self.solo and self.run_dir is None and self.resume is None

    @property
    def checkpoints(self) -> tuple[int, str, int] | None:
        """Steps between checkpoints, their folder, and how many are kept; None: there are none."""
        if self.run_dir is None:
            return None
        folder = checkpoint_folder(self.run_dir, 0).parent.absolute()
        return self.checkpoint_every or 0, str(folder), self.keep_checkpoints

    @property
    def heard_by_others(self) -> str:
        """What this worker would send unencrypted beyond this host; empty if nothing."""
        if self.address and (heard := self.heard_at("line", self.address)):
            return heard
        if self.tls is not None or self.insecure or self.ring_bind in ("", "off"):
            return ""
        host, _ = endpoint_of("ring_bind (ANDON_RING_BIND)", self.ring_bind)
        return "" if is_loopback(host) else f"ANDON_RING_BIND={self.ring_bind} is open to others"

    def heard_at(self, what: str, address: str) -> str:
        """Why talking to `address` would be readable for others; empty if it would not be."""
        if self.tls is not None or self.insecure or is_loopback(host_of(address)):
            return ""
        return f"the {what} at {address} is on another host"

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        """Host and port of this worker's metrics; port 0: any free one. None: not served."""
        if self.metrics_bind == "off":
            return None
        return endpoint_of("metrics_bind (ANDON_METRICS_BIND)", self.metrics_bind)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What this worker can do that not every worker can."""
        ring = () if self.ring_bind == "off" else (RING_CAPABILITY,)
        local = () if self.shared_dir is None else (CONTROL_SOCKET,)
        return (*WORKER_CAPABILITIES, PROBE, EXPLAINS, *ring, *local)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **arguments: Any) -> LineConfig:
        """The configuration of this process.

        Args:
            environment: variables; None: those of the process.
            arguments: fields by name; None counts as not given.

        Raises:
            TypeError: there is no such field.
            ValueError: a variable can't be read, or two values contradict each other.
        """
        env = os.environ if environment is None else environment
        found: dict[str, Any] = {
            each.name: each.metadata["read"](each.metadata["variable"], text)
            for each in fields(cls)
            if "read" in each.metadata and (text := env.get(each.metadata["variable"], "").strip())
        }
        found |= place_in_launch(env)
        found["token"] = _token(env)
        run_id = env.get("ANDON_RUN_ID", "")
        found["andon_run"] = bool(run_id) and env.get("TORCHELASTIC_RUN_ID") == run_id
        if str(arguments.get("resume")) == "latest" and "resume" in found:
            # `andon run --resume` has chosen a checkpoint of the line's present history.
            arguments["resume"] = None
        if "audit" in found:
            arguments = {name: arguments[name] for name in arguments.keys() - {*_OF_AN_AUDIT}}
        found.update({name: value for name, value in arguments.items() if value is not None})
        unknown = found.keys() - {each.name for each in fields(cls)}
        if unknown:
            raise TypeError(f"Line has no setting {', '.join(sorted(unknown))}")
        if not found.get("address"):
            found["launch"] = store_of_launch(env)
            if found["launch"] is None:
                refuse_to_be_many(env)
        if str(found.get("resume")) == "latest":
            # A launch goes on from its newest checkpoint anyway, once rank 0 has said where it is.
            launched = found.get("launch") is not None and found.get("run_dir") is None
            found["resume"] = None if launched else _latest(found.get("run_dir"))
        return cls(**found)


def _latest(run_dir: Path | str | None) -> Path | None:
    """The checkpoint that `resume="latest"` means; None if there is none: then a run begins."""
    if run_dir is None:
        raise ValueError(
            'resume="latest" looks for checkpoints in the run\'s folder, and there is none: pass '
            "run_dir, or start the script with `andon run`"
        )
    return newest_whole(Path(run_dir))


def endpoint_of(setting: str, text: str) -> tuple[str, int]:
    """Host and port to listen on; port 0 is any free one.

    Raises:
        ValueError: `text` is no host, host:port or [host]:port; the message names `setting`.
    """
    try:
        place = urlsplit(f"//{text}")
        host, port = place.hostname, place.port or 0
    except ValueError:
        host, port = None, 0
    if not host or place.netloc != text or "@" in text:
        raise ValueError(f"{setting} must be a host, host:port, [host]:port or off, not {text!r}")
    return host, port


def _token(env: Mapping[str, str]) -> bytes:
    path = env.get("ANDON_TOKEN_FILE", "")
    return read_token(
        Path(path) if path else None,
        env.get("ANDON_TOKEN", ""),
        file_setting="ANDON_TOKEN_FILE",
        text_setting="ANDON_TOKEN",
    )
