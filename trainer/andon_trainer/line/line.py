"""Line: a training script's one object, alone or together with other workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from andon.host.logs import LogFormat
from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon.protocol.scalars import ScalarNames
from andon_trainer.config import LineConfig
from andon_trainer.data.evaluation import Coverage, Splitting
from andon_trainer.line.life import LineLife
from andon_trainer.line.logs import Logs
from andon_trainer.line.preparing import Preparing
from andon_trainer.line.together import Together
from andon_trainer.line.worker import Worker
from andon_trainer.process.device import pick_device
from andon_trainer.process.logs import write_logs
from andon_trainer.schedules.stepper import StepperGate

__all__ = ["Line"]


class Line(Preparing, Together, Logs, LineLife):
    """One training script's connection to the line: data, gradients, commits and checkpoints.

    A plain PyTorch loop calls `prepare` once, iterates `epochs` and the prepared loader, and calls
    `line.backward(loss)` instead of `loss.backward()`:

    ```python
    line = Line()
    model, optimizer, loader = line.prepare(model, optimizer, loader)
    for epoch in line.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    ```

    A script with several optimizers, or exchanges of its own, calls `join` instead; see there.

    Without an address (argument, `ANDON_ADDRESS`, or torchrun's variables) the worker is solo: it
    starts no service and no threads, and computes what one worker on a line would.
    """

    def __init__(  # noqa: PLR0913  # spelled out, so that an editor completes each setting
        self,
        *,
        address: str | None = None,
        run_id: str | None = None,
        seed: int | None = None,
        on_halt: Literal["raise", "wait"] | None = None,
        log_format: LogFormat | None = None,
        device: str | None = None,
        run_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int | None = None,
        resume: str | Path | None = None,
        total_steps: int | None = None,
        check_data: bool | None = None,
        max_overflows: int | None = None,
        token: bytes | None = None,
        tls: str | Path | None = None,
        insecure: bool | None = None,
        launch_slot: int | None = None,
        launch_size: int | None = None,
        local_rank: int | None = None,
        speed_hint: float | None = None,
        metrics_bind: str | None = None,
        metrics_hosts: str | None = None,
        metrics_token_file: str | Path | None = None,
        shared_dir: str | Path | None = None,
        tcp: bool | None = None,
        ring_bind: str | None = None,
        log_to: Literal["csv", "tensorboard"] | None = None,
        trace: str | Path | None = None,
        checksums: bool | None = None,
    ) -> None:
        """Reads the configuration; opens nothing yet.

        An argument overrides the environment variable of the same setting, which overrides the
        default; None: not given. docs/settings.md lists the variables.

        Args:
            address: the coordinator, as host:port.
            run_id: the run to join; empty: the run that is served at `address`.
            seed: seed of the sample order, 64 bits; the same on all workers.
            on_halt: `raise` LineHalted when the line stops, or `wait` for the operator's answer.
            log_format: write this process's logs as `text`, or as `json` with one object a line.
            device: `cpu`, `cuda` or `cuda:1`; default: CUDA if there is a GPU, else the CPU.
            run_dir: folder of the run's files; default: the run keeps none.
            checkpoint_every: steps between two checkpoints, which one worker writes; 0: none.
            keep_checkpoints: number of checkpoints to keep, the newest ones.
            resume: folder of the checkpoint to resume from.
            total_steps: steps after which the run ends; default: the script decides.
            check_data: whether workers compare digests of their training sets when they join.
            max_overflows: steps in a row that a prepared GradScaler may skip; 16 by default.
            token: the run's token, if the line asks for one.
            tls: folder of this worker's certificates; default: nothing is encrypted.
            insecure: whether this worker may talk to other hosts without encryption.
            launch_slot: the slot that the launcher gave this worker.
            launch_size: number of workers that the launcher started.
            local_rank: this worker's number on its host; picks the GPU. Default: one that no other
                worker of this host has claimed.
            speed_hint: how fast this worker is, compared with the others, until it is measured.
            metrics_bind: where this worker's metrics are served: a host, host:port, or `off`.
            metrics_hosts: more host names under which they may be read, with commas between them.
            metrics_token_file: the file with the token that a reader of the metrics has to show.
            shared_dir: folder for memory that is shared with a reducer on this host, or `off`.
            tcp: whether gradients may take TCP lanes beside gRPC, where the other end has them.
            ring_bind: where this worker listens for its neighbour in a ring, or `off`.
            log_to: what `line.log` gets is also written to the run's folder by the worker of rank
                0: `csv` to `scalars.csv`, `tensorboard` to `tensorboard/`.
            trace: the file whose part this worker records; default: nothing is recorded.
            checksums: whether chunks get checksums; False is for measuring what they cost.

        Raises:
            ValueError: a value or an environment variable is invalid; the message names it.
            RuntimeError: this process has a `Line` already, and trains on it.
            JoinRefused: this process has trained the run of this configuration to its end.
        """
        self._close_forgotten()
        config = LineConfig.read(
            address=address,
            run_id=run_id,
            seed=seed,
            on_halt=on_halt,
            log_format=log_format,
            device=device,
            run_dir=run_dir,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            resume=resume,
            total_steps=total_steps,
            check_data=check_data,
            max_overflows=max_overflows,
            token=token,
            tls=tls,
            insecure=insecure,
            launch_slot=launch_slot,
            launch_size=launch_size,
            local_rank=local_rank,
            speed_hint=speed_hint,
            metrics_bind=metrics_bind,
            metrics_hosts=metrics_hosts,
            metrics_token_file=metrics_token_file,
            shared_dir=shared_dir,
            tcp=tcp,
            ring_bind=ring_bind,
            log_to=log_to,
            trace=trace,
            checksums=checksums,
        )
        # A lock shares no memory: `off` does not mean it.
        claims = None if config.solo else config.shared_dir or DEFAULT_SHARED_DIR
        self.device = pick_device(config.local_rank, config.device, claims=claims)
        self.complete = False
        self._worker = Worker(config, self.device)
        self._end_logs = write_logs(
            config.log_format, self._worker.log_facts, marked=config.andon_run
        )
        self._gate = StepperGate()
        self._schedulers = []
        self._coverage = Coverage()
        self._splitting = Splitting(self.device)
        self._undo = []
        self._scalar_names = ScalarNames()
        self._last_logged = {}
        self._begin_life()
