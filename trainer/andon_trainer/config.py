"""Where the line is and how to behave on it: the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from andon.host.manifest import checkpoint_folder
from andon.host.run_token import read_token
from andon.host.shared_dir import DEFAULT_SHARED_DIR, shared_dir_of
from andon.host.tls import host_of, is_loopback
from andon.protocol.ring import RING_CAPABILITY

__all__ = ["LineConfig", "TorchrunStore", "endpoint_of"]

_ON_HALT = ("raise", "wait")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where launchers say how many processes they started: torchrun, Open MPI, MPICH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunStore:
    """The store of a torchrun launch, through which rank 0 publishes the line's address."""

    host: str
    port: int
    rank: int
    world_size: int
    hosted_by_agent: bool
    """Whether torchrun's agent serves the store; else rank 0 does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineConfig:
    """One worker's configuration. Argument beats environment beats default."""

    address: str = ""
    """The coordinator, as host:port; empty: solo, or torchrun's."""
    run_id: str = ""
    """The run to join; empty: whichever is served there."""
    token: bytes = field(default=b"", repr=False)
    """The run's token, which the line asks for if it has one."""
    tls: Path | None = None
    """The folder of this worker's certificates; None: what it sends is not encrypted."""
    insecure: bool = False
    """Whether it may speak to other hosts without encryption."""
    on_halt: str = "raise"
    """`raise` LineHalted, or `wait` for the operator's answer."""
    seed: int = 0
    """Seeds the order of the samples."""
    launch_slot: int | None = None
    """The slot that the launcher gave this worker."""
    launch_size: int = 1
    """How many workers the launcher started."""
    local_rank: int = 0
    """Picks the GPU."""
    run_dir: Path | None = None
    """Where the run keeps its files; None: it keeps none."""
    checkpoint_every: int = 0
    """Rank 0 writes a checkpoint every so many steps; 0 is never."""
    keep_checkpoints: int = 3
    """The newest so many checkpoints are kept."""
    resume: Path | None = None
    """The folder of the checkpoint to go on from; None: begin anew."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1`; empty picks CUDA if there is one."""
    check_data: bool = True
    """Whether workers compare what their training sets are."""
    total_steps: int | None = None
    """Steps after which the script ends, if it sets them: for progress."""
    metrics_bind: str = "127.0.0.1"
    """Where this worker's metrics are served: a host (on any free port), host:port, or `off`."""
    shared_dir: Path | None = DEFAULT_SHARED_DIR
    """Where memory is shared with a reducer of this host; None: nowhere."""
    ring_bind: str = ""
    """Where this worker listens for its neighbour on a line that is a ring: a host (on any free
    port), host:port, or `off`: it joins no ring. Empty: loopback if the coordinator is there, else
    the address from which this machine reaches it."""
    checksums: bool = True
    """Whether chunks get checksums where both ends can; False is for measuring what they cost."""
    torchrun: TorchrunStore | None = None
    """Set under torchrun when no address is."""

    def __post_init__(self) -> None:
        """Refuses values that contradict each other."""
        if self.on_halt not in _ON_HALT:
            raise ValueError(f"on_halt must be one of {', '.join(_ON_HALT)}, not {self.on_halt!r}")
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every must be 0 or more, not {self.checkpoint_every}")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints must be 1 or more, not {self.keep_checkpoints}")
        if self.checkpoint_every and self.run_dir is None:
            raise ValueError(
                "checkpoint_every needs a place to write to: pass run_dir, or start the script "
                "with `andon run`"
            )
        _ = self.metrics_endpoint
        if self.ring_bind not in ("", "off"):
            endpoint_of("ring_bind (ANDON_RING_BIND)", self.ring_bind)

    @property
    def solo(self) -> bool:
        """Whether there is no line to join."""
        return not self.address and self.torchrun is None

    @property
    def on_its_own(self) -> bool:
        """Whether nobody is there to compare with, now or in a checkpoint."""
        return self.solo and self.run_dir is None and self.resume is None

    @property
    def checkpoints(self) -> tuple[int, str] | None:
        """Every how many steps checkpoints are written, and where; None: nowhere."""
        if self.run_dir is None:
            return None
        return self.checkpoint_every or 0, str(checkpoint_folder(self.run_dir, 0).parent.absolute())

    @property
    def heard_by_others(self) -> str:
        """What would leave this host for everybody on the way to read; empty if nothing would."""
        if self.address and (heard := self.heard_at("line", self.address)):
            return heard
        if self.tls is not None or self.insecure or self.ring_bind in ("", "off"):
            return ""
        host, _ = endpoint_of("ring_bind (ANDON_RING_BIND)", self.ring_bind)
        return "" if is_loopback(host) else f"ANDON_RING_BIND={self.ring_bind} is open to others"

    def heard_at(self, what: str, address: str) -> str:
        """What others could read if this worker spoke to an address; empty if they could not."""
        if self.tls is not None or self.insecure or is_loopback(host_of(address)):
            return ""
        return f"the {what} at {address} is on another host"

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        """Host and port of this worker's metrics; port 0 is any free one, None is nowhere."""
        if self.metrics_bind == "off":
            return None
        return endpoint_of("metrics_bind (ANDON_METRICS_BIND)", self.metrics_bind)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What this worker can do beside what every worker can."""
        return () if self.ring_bind == "off" else (RING_CAPABILITY,)

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **arguments: Any) -> LineConfig:
        """The configuration of this process: `arguments` that are not None, then `ANDON_*`.

        Raises:
            ValueError: a variable can't be read, or two values contradict each other.
        """
        env = os.environ if environment is None else environment
        found: dict[str, Any] = {
            "address": env.get("ANDON_ADDRESS", ""),
            "run_id": env.get("ANDON_RUN_ID", ""),
            "token": _token(env),
            "tls": env.get("ANDON_TLS_DIR") or None,
            "insecure": _switch(env, "ANDON_INSECURE"),
            "on_halt": env.get("ANDON_ON_HALT", "raise"),
            "launch_slot": _number(env, "RANK"),
            "launch_size": _number(env, "WORLD_SIZE") or 1,
            "local_rank": _number(env, "LOCAL_RANK") or 0,
            "metrics_bind": env.get("ANDON_METRICS_BIND") or "127.0.0.1",
            "ring_bind": env.get("ANDON_RING_BIND", ""),
            "seed": _number(env, "ANDON_SEED") or 0,
            "checkpoint_every": _number(env, "ANDON_CHECKPOINT_EVERY") or 0,
            "keep_checkpoints": _number(env, "ANDON_KEEP_CHECKPOINTS") or 3,
            "run_dir": env.get("ANDON_RUN_DIR") or None,
            "resume": env.get("ANDON_RESUME") or None,
            "check_data": _switch(env, "ANDON_CHECK_DATA", unset=True),
            "shared_dir": shared_dir_of(env.get("ANDON_SHARED_DIR", "")),
        }
        found.update({name: value for name, value in arguments.items() if value is not None})
        for name in ("run_dir", "resume", "tls"):
            found[name] = None if found[name] is None else Path(found[name])
        if not found["address"]:
            found["torchrun"] = _torchrun(env)
            if found["torchrun"] is None:
                _refuse_to_be_many(env)
        return cls(**found)


def _refuse_to_be_many(env: Mapping[str, str]) -> None:
    """Raises if a launcher started several processes, each of which would train alone."""
    for name in _SIZES:
        size = _number(env, name) or 1
        if size > 1:
            raise ValueError(
                f"{name} is {size}, and nothing says where the line is: each of the {size} "
                f"processes would train alone. Start them with `andon run --workers {size}` or "
                "torchrun, or set ANDON_ADDRESS to the line's host:port; to train alone unset "
                f"{name}"
            )


def endpoint_of(setting: str, text: str) -> tuple[str, int]:
    """Host and port of what is to be listened on; port 0 is any free one.

    Raises:
        ValueError: `setting` is no host, host:port or [host]:port.
    """
    try:
        place = urlsplit(f"//{text}")
        host, port = place.hostname, place.port or 0
    except ValueError:
        host, port = None, 0
    if not host or place.netloc != text or "@" in text:
        raise ValueError(f"{setting} must be a host, host:port, [host]:port or off, not {text!r}")
    return host, port


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}: unset it") from None


def _token(env: Mapping[str, str]) -> bytes:
    path = env.get("ANDON_TOKEN_FILE", "")
    return read_token(
        Path(path) if path else None,
        env.get("ANDON_TOKEN", ""),
        file_setting="ANDON_TOKEN_FILE",
        text_setting="ANDON_TOKEN",
    )


def _switch(env: Mapping[str, str], name: str, *, unset: bool = False) -> bool:
    text = env.get(name, "").strip().lower()
    if text not in ("", "0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"{name} must be 1 or 0, not {text!r}")
    return text in ("1", "true", "yes", "on") if text else unset


def _torchrun(env: Mapping[str, str]) -> TorchrunStore | None:
    if "TORCHELASTIC_RUN_ID" not in env or "MASTER_ADDR" not in env:
        return None
    rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank is None or size is None or port is None:
        return None
    return TorchrunStore(
        host=env["MASTER_ADDR"],
        port=port,
        rank=rank,
        world_size=size,
        hosted_by_agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
