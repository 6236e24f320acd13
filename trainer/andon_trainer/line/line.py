"""Line: a training script's one object, alone or together with other workers."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from andon.host.logs import LogFormat
from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon_trainer.config import LineConfig
from andon_trainer.core.events import Committed
from andon_trainer.data.loader import LineLoader
from andon_trainer.line.joining import join_by_hand
from andon_trainer.line.life import Life, close_forgotten
from andon_trainer.line.logs import Logs
from andon_trainer.line.loop import TrainingLoop
from andon_trainer.line.preparing import prepare
from andon_trainer.line.session import LineSession
from andon_trainer.line.together import Together
from andon_trainer.line.worker import Worker
from andon_trainer.line_options import LineSchema
from andon_trainer.model.graph import Graph
from andon_trainer.process.device import pick_device
from andon_trainer.process.logs import write_logs
from andon_trainer.state.checkpoint_files import Stateful

__all__ = ["Line"]


class Line:
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
        token: bytes | None = None,
        tls: str | Path | None = None,
        insecure: bool | None = None,
        seed: int | None = None,
        line_options: LineSchema | None = None,
        total_steps: int | None = None,
        check_data: bool | None = None,
        on_halt: Literal["raise", "wait"] | None = None,
        same_bits: bool | None = None,
        arithmetic: Literal["require", "tell"] | None = None,
        max_overflows: int | None = None,
        run_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int | None = None,
        resume: str | Path | None = None,
        launch_slot: int | None = None,
        launch_size: int | None = None,
        local_rank: int | None = None,
        device: str | None = None,
        speed_hint: float | None = None,
        spare: bool | None = None,
        preemption_notice: str | None = None,
        notice_grace_s: float | None = None,
        tcp: bool | None = None,
        connections: int | None = None,
        shared_dir: str | Path | None = None,
        ring_bind: str | None = None,
        checksums: bool | None = None,
        log_format: LogFormat | None = None,
        log_to: Literal["csv", "tensorboard"] | None = None,
        metrics_bind: str | None = None,
        metrics_hosts: str | None = None,
        metrics_token_file: str | Path | None = None,
        trace: str | Path | None = None,
    ) -> None:
        """Reads the configuration; opens nothing yet.

        An argument overrides the environment variable of the same setting, which overrides the
        default; None: not given. docs/settings.md lists the variables.

        Args:
            address: the coordinator, as host:port.
            run_id: the run to join; empty: the run that is served at `address`.
            token: the run's token, if the line asks for one.
            tls: folder of this worker's certificates; default: nothing is encrypted.
            insecure: whether this worker may talk to other hosts without encryption.
            seed: seed of the sample order, 64 bits; the same on all workers.
            line_options: how the line works, if rank 0 of this launch serves it: an
                `andon_coordinator.config.LineOptions`. Default: the environment decides.
            total_steps: steps after which the run ends; default: the script decides.
            check_data: whether workers compare digests of their training sets when they join.
            on_halt: `raise` LineHalted when the line stops, or `wait` for the operator's answer.
            same_bits: whether the weights have the same bits on any number of workers.
            arithmetic: what to do with a checkpoint of another arithmetic, if `same_bits` is set.
            max_overflows: steps in a row that a prepared GradScaler may skip; 16 by default.
            run_dir: folder of the run's files; default: the run keeps none.
            checkpoint_every: steps between two checkpoints, which one worker writes; 0: none.
            keep_checkpoints: number of checkpoints to keep, the newest ones.
            resume: folder of the checkpoint to resume from.
            launch_slot: the slot that the launcher gave this worker.
            launch_size: number of workers that the launcher started.
            local_rank: this worker's number on its host; picks the GPU. Default: one that no other
                worker of this host has claimed.
            device: `cpu`, `cuda` or `cuda:1`; default: CUDA if there is a GPU, else the CPU.
            speed_hint: how fast this worker is, compared with the others, until it is measured.
            spare: whether this worker computes nothing until it takes a lost worker's place.
            preemption_notice: a file that appears, or a URL that answers, when this machine is
                about to go; default: nothing is watched.
            notice_grace_s: seconds in which a worker that is to leave may bring what it computed.
            tcp: whether gradients may take TCP lanes beside gRPC, where the other end has them.
            connections: connections of a TCP lane to a reducer each way, 1 to 16; default: the
                line decides.
            shared_dir: folder for memory that is shared with a reducer on this host, or `off`.
            ring_bind: where this worker listens for its neighbour in a ring, or `off`.
            checksums: whether chunks get checksums; False is for measuring what they cost.
            log_format: write this process's logs as `text`, or as `json` with one object a line.
            log_to: what `line.log` gets is also written to the run's folder by the worker of rank
                0: `csv` to `scalars.csv`, `tensorboard` to `tensorboard/`.
            metrics_bind: where this worker's metrics are served: a host, host:port, or `off`.
            metrics_hosts: more host names under which they may be read, with commas between them.
            metrics_token_file: the file with the token that a reader of the metrics has to show.
            trace: the file whose part this worker records; default: nothing is recorded.

        Raises:
            ValueError: a value or an environment variable is invalid; the message names it.
            RuntimeError: this process has a `Line` already, and trains on it; or `same_bits` comes
                too late, since MKL has computed something.
            JoinRefused: this process has trained the run of this configuration to its end.
        """
        # First: it is what this call was given, and each setting stands in the signature alone.
        given = {name: value for name, value in locals().items() if name != "self"}
        close_forgotten()
        config = LineConfig.read(**given)
        # A lock shares no memory: `off` does not mean it.
        claims = None if config.solo else config.shared_dir or DEFAULT_SHARED_DIR
        worker = Worker(config, pick_device(config.local_rank, config.device, claims=claims))
        self._session = session = LineSession(worker)
        self._loop = TrainingLoop(session)
        self._together = Together(session)
        self._logs = Logs(session)
        end_logs = write_logs(config.log_format, worker.log_facts, marked=config.andon_run)
        self._life = Life(session, end_logs)

    # ------------------ from the beginning to the end

    def prepare(self, *objects: Any, micro_batch_size: int | None = None) -> Any:
        """Joins the line with models, optimizers, schedulers, a scaler and a training loader.

        Models are moved to `line.device` and get rank 0's weights. Optimizers and schedulers stay
        the same objects; their `step()` acts only when the line commits a step. So does a
        GradScaler, which scales what `line.backward` is given; its state is kept. The loader is
        replaced by one that yields this worker's samples. Without a loader the worker joins when
        `line.shards` is first called. A model that is wrapped in DistributedDataParallel makes the
        processes of its group one worker.

        ```python
        model, optimizer, loader = line.prepare(model, optimizer, loader, micro_batch_size=8)
        ```

        Args:
            objects: in any order, at most one scaler and one loader. The loader's `batch_size` is
                that of a whole step, over all workers.
            micro_batch_size: the most samples in one forward; the loop body then runs several
                times in a step, and gradients are accumulated. None: all of a worker's share. With
                `same_bits` each forward sees exactly so many, and it must be given.

        Returns:
            The objects in the same order; the object itself if there is only one.

        Raises:
            RuntimeError: `prepare` or `join` was called before.
            TypeError: an object is none of these, or a model is wrapped in DataParallel, or in
                DistributedDataParallel under `andon run`.
            ValueError: an optimizer trains a parameter of no prepared model or can't work with
                averaged gradients, or the loader's sampler can't be followed.
            JoinRefused: the line does not accept this worker.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineLost: no coordinator answers.
        """
        return prepare(self._session, self._loop, objects, micro_batch_size)

    def join(self, *modules: nn.Module) -> None:
        """Joins the line with `modules`, for manual steps; use it instead of `prepare`.

        The workers' models are compared, the modules are moved to `line.device`, and they get rank
        0's weights. Nothing is wrapped, and optimizers step whenever the script calls them. Before
        `join`, register optimizers and whatever else a checkpoint or a new worker needs, with
        `line.register(name, thing)`.

        ```python
        line.register("optimizer", optimizer)
        line.join(generator, discriminator)
        ```

        Args:
            modules: every module whose gradients are exchanged.

        Raises:
            RuntimeError: `prepare` or `join` was called before.
            TypeError: an argument is not a module.
            ValueError: no parameter is trained, or two modules share a parameter.
            JoinRefused: the line does not accept this worker.
            CheckpointRefused: the run can't be resumed from its checkpoint.
            LineLost: no coordinator answers.
        """
        join_by_hand(self._session, modules)

    def register(self, name: str, thing: Stateful) -> None:
        """Adds `thing`'s state to checkpoints and to what a new worker receives.

        Use it for an EMA, or anything else with `state_dict()` and
        `load_state_dict()`. State that has arrived already is loaded at once.

        Args:
            name: unique; the state is found by it.
            thing: its `state_dict()` holds dense tensors, numbers, strings, lists, tuples and
                dicts.

        Raises:
            TypeError: the state holds something else, which could only be pickled.
            ValueError: the name is taken.
        """
        self._session.worker.replica.register(name, thing)

    def __enter__(self) -> Self:
        """Returns the line; `close` runs at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the line; an exception that ends the block is reported as this worker's failure.

        Raises:
            LineHalted: the workers' final weights differ.
        """
        if error is not None:
            self._session.worker.note_failure(error)
        self.close()

    def close(self) -> None:
        """Leaves the line and gives everything back; a second call does nothing.

        Optimizers, schedulers, models and datasets are then what they were before `prepare`, with
        the weights of now; the process's hooks and signals, too. A second `Line` can take the same
        objects. It runs by itself when Python exits, at the end of `with Line() as line:`, and for
        a line that was forgotten when a second one is made.

        Raises:
            LineHalted: the workers' final weights differ.
        """
        self._life.close()

    # ------------------ the loop of a script that prepared

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs that are left of `count`, from the line's current one on.

        A resumed run begins in its checkpoint's epoch. The loop also ends when the run stops
        (`line.stopped`). A script may leave an epoch's batches early (`break`, `islice`): the rest
        of the epoch is then skipped on all workers.

        Args:
            count: number of epochs in the whole run.

        Yields:
            The epoch's number, from 0.

        Raises:
            RuntimeError: the script left an epoch between `line.backward(loss)` and
                `optimizer.step()`, or called `join`.
            LineHalted: the line stopped, or the workers' final weights differ.
        """
        return self._loop.epochs(count)

    def shards(self, samples: int, batch_size: int) -> LineLoader:
        """Yields indices of samples, for scripts without a DataLoader.

        ```python
        for shard in line.shards(len(labels), batch_size=32):
            line.backward(loss_of(model(features[shard.indices]), labels[shard.indices]))
            optimizer.step()
        ```

        Args:
            samples: number of samples in an epoch.
            batch_size: samples in one step, over all workers.

        Returns:
            An iterable of `Shard`, for one epoch each time that it is iterated.

        Raises:
            ValueError: a number is below 1, or another one than at the first call.
            RuntimeError: `prepare` was not called, or `join` was.
            JoinRefused, CheckpointRefused, LineLost: as from `prepare`.
        """
        return self._loop.shards(samples, batch_size)

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        *,
        correct: int | torch.Tensor | None = None,
        scaler: object = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Runs backward; after a step's last micro-batch `p.grad` is the mean over all workers.

        Call it once for each batch of the prepared loader; add up several losses. Until the last
        micro-batch of the step `p.grad` is None; after it, clip, log or unscale gradients as usual.
        With a prepared GradScaler the loss is scaled, whether or not `scaler.scale(loss)` was;
        `line.loss` is not.

        ```python
        line.backward(loss)                     # a mean over samples
        line.backward(loss, weight=n_tokens)    # a mean over tokens
        line.backward(loss + 0.1 * auxiliary)   # several losses of one batch
        ```

        Args:
            loss: mean loss of this micro-batch; a scalar.
            weight: number of terms that `loss` is the mean of; None: the number of samples.
            correct: number of these samples that the model got right, for `line.accuracy`. Pass it
                for every batch on every worker, or for none.
            scaler: was the script's GradScaler; give it to `line.prepare`.
            retain_graph: whether the script may use the loss's graph again.
            create_graph: whether gradients get graphs of their own, such as `x.grad` of an input.
                Those of parameters do not: they are means over all workers.

        Raises:
            TypeError: `scaler` was passed.
            LineHalted: a loss or gradient was not finite on some worker; no weights moved.
            RuntimeError: the prepared loader has yielded no batch for this call.
            RunOver: the batch is from after the end of the run, when loaders are plain ones.
            ValueError: the loss is no scalar, only a part of it is scaled, the weight is negative
                or not finite, or `correct` is more than the batch's samples.
        """
        self._loop.backward(
            loss,
            weight,
            correct=correct,
            scaler=scaler,
            graph=Graph(retain_graph, create_graph),
        )

    def accumulate(self, every: int) -> AbstractContextManager[None]:
        """Around the loop body: adds up the gradients of `every` batches for one optimizer step.

        Each batch is exchanged and committed as ever. Its mean over all workers is added up, and
        the weights move with every `every`-th batch, or the last one of an epoch, by the mean over
        all of them. In between `p.grad` is None after `backward`, and `zero_grad`, clipping,
        `optimizer.step()` and a prepared scheduler do nothing. Call them in each body, and do not
        divide the loss.

        ```python
        for x, y in loader:
            with line.accumulate(4):
                optimizer.zero_grad()
                line.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        ```

        `line.step` counts every batch; `line.committed` is true where the weights moved. The sum
        is in checkpoints and goes to new workers. If the memory of one forward is all that you are
        short of, `prepare(..., micro_batch_size=n)` exchanges once a step and not once a batch.

        Args:
            every: number of batches; 1 changes nothing.

        Raises:
            ValueError: `every` is below 1.
            RuntimeError: `every` changed in the middle of an accumulation, the line makes local
                steps, or the script called `join`.
        """
        return self._loop.accumulate(every)

    @property
    def reshaped(self) -> bool:
        """Whether state that the last loop body left does not belong to this batch's samples.

        It is False only if the last loop body was for the step before, and had the same rows of its
        batch. So it is True in the first loop body; where this worker's share changed, since a
        worker was lost or came, or shares follow speed; in a step that is tried again, and for a
        short last batch and the one after it. With micro-batches, local steps or windows of several
        batches it is always True: the loop body before had other rows.

        A script that carries hidden state from batch to batch drops it then:

        ```python
        for x, y in loader:
            if line.reshaped:
                state = None
            scores, state = model(x, state)
        ```
        """
        return self._loop.reshaped

    def stop(self, reason: str) -> None:
        """Ends the run: all workers' loops end after the same step, the current or the next one.

        Any worker may call it. On a line with `--may-stop operators` none may: then it has no
        effect, and the worker's log says so.

        Args:
            reason: becomes `line.stopped` on all workers.
        """
        self._session.want_stop(reason)

    # ------------------ steps by hand

    def all_reduce_gradients(self, module: nn.Module, weight: float | None = None) -> None:
        """Replaces `p.grad` by the mean over all workers, for every trained parameter of `module`.

        Call it after the last backward that reaches the module.

        Args:
            module: one of the joined modules.
            weight: this worker's weight in the mean, such as its number of samples; finite, at
                least 0. With 0 the worker contributes nothing and gets the others' mean. None: all
                workers weigh the same.

        Raises:
            ValueError: the weight is negative or not finite, all workers' weights are 0 (gradients
                are zero then), or the module was not joined.
            RuntimeError: a GradScaler scales the script's losses.
            LineHalted: a value was not finite on some worker; no weights moved.
        """
        self._session.by_hand.average(module, 1.0 if weight is None else float(weight))

    def should_commit(self) -> bool:
        """Ends the step; returns True on all workers or on none.

        If it is True, call the optimizers' `step()` right away. If it is False, the roster changed:
        `p.grad` is None, `line.rank` and `line.world_size` are new, and the script computes step
        `line.step + 1` again. It is also False if the run ended before the step could: then
        `line.complete` is True.

        ```python
        if line.should_commit():
            optimizer.step()
        ```

        Raises:
            RuntimeError: a gradient was added after its mean was taken.
            RunOver: the script goes on though `line.complete` is True.
            LineHalted: the line stopped; no weights moved.
        """
        committed = self._session.by_hand.should_commit()
        self._session.complete = self.complete or bool(self.stopped)
        return committed

    def sync_buffers(self, module: nn.Module) -> None:
        """Copies rank 0's buffers of `module`, of any dtype, to all workers.

        Raises:
            LineHalted: the line stopped, or the workers' buffers differ in name, dtype or shape.
        """
        self._session.by_hand.sync_buffers(module)

    def sync_params(self, module: nn.Module) -> None:
        """Copies rank 0's parameters of `module`, trained or frozen, to all workers.

        Raises:
            LineHalted: the line stopped, or the workers' parameters differ in name, dtype or shape.
        """
        self._session.by_hand.sync_params(module)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites `tensor` with rank 0's, bit for bit.

        Args:
            tensor: dense, of any dtype and shape, on any device; the same dtype and shape on every
                worker.

        Raises:
            ValueError: the tensor is sparse or quantised.
            LineHalted: the line stopped, or the workers' tensors differ in dtype or shape.
        """
        self._session.by_hand.broadcast("broadcast", {"tensor": tensor})

    def barrier(self) -> None:
        """Waits until every worker has called it; returns at once if the step is lost.

        Raises:
            LineHalted: the line stopped.
        """
        self._session.by_hand.barrier()

    # ------------------ all workers together, between two steps

    def split(self, loader: DataLoader[Any] | LineLoader) -> Iterator[Any]:
        """Yields this worker's share of a loader's samples; all shares together hold each once.

        Use it for evaluation, and combine the results with `line.mean`. Samples come in the order
        of the dataset or of the loader's own sampler. Batches of a batch sampler or of an
        `IterableDataset` are not divided: each goes to one worker, and every worker reads the
        whole stream. If a worker is lost, so is its share; `line.covered` tells. Before its first
        step a worker gets all samples. With `same_bits` no batch is divided, every worker must
        iterate to the end, and those that are left compute a lost worker's batches: see
        `line.tally`.

        ```python
        for x, y in line.split(val_loader):
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            n += len(y)
        val_loss = line.mean(total / max(n, 1), weight=n)
        ```

        Args:
            loader: with whatever sampler, `collate_fn` and loading processes it has; processes
                stay between evaluations if it says `persistent_workers=True`. Its batches are
                moved to `line.device`. The prepared loader may be given, too: to evaluate on the
                training set.

        Raises:
            TypeError: it is what `line.shards` returned.
        """
        return self._together.split(loader)

    @property
    def covered(self) -> bool:
        """Whether what followed the last `line.split` covered every sample of it.

        It becomes False, on every worker, in a `line.mean` or `line.gather` that lacks a worker's
        samples, and stays so until the next `line.split`. Evaluate again, and the workers that are
        left divide all samples.
        """
        return self._together.coverage.complete

    def common_weights(self) -> AbstractContextManager[None]:
        """Within it the models hold the weights that all workers have in common.

        On local steps with `--overlap`, `--fragments` or a quorum a worker's own weights differ
        from those after a commit. Everywhere else they are the same, and nothing happens. Others
        need not call it. What you change of the models within it is lost.

        ```python
        if line.committed and line.step % 100 == 0:
            with line.common_weights():
                loss = evaluate(model)
        ```

        Raises:
            RuntimeError: on local steps, a batch has not gone backward yet; from the loop or from
                `optimizer.step()`, the next batch is asked for or weights are moved within.
        """
        steps = self._session.stepper
        return nullcontext() if steps is None else steps.common_weights()

    @overload
    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float: ...

    @overload
    def mean(
        self, value: Mapping[str, float | torch.Tensor], weight: float = 1.0
    ) -> dict[str, float]: ...

    def mean(
        self,
        value: float | torch.Tensor | Mapping[str, float | torch.Tensor],
        weight: float = 1.0,
    ) -> float | dict[str, float]:
        """Returns the weighted mean of all workers' values: the same number on every worker.

        Every worker must call it, between two steps.

        ```python
        val = line.mean({"loss": total / n, "accuracy": right / n}, weight=n)
        ```

        Args:
            value: a number or a tensor with one element; or several of them by name, the same
                names on every worker.
            weight: this worker's weight in the mean, such as its number of samples.

        Returns:
            The mean, computed in float64; nan if all weights are 0. Of several numbers the means
            by name.

        Raises:
            ValueError: the weight is negative or not finite, or the workers' names differ.
            RuntimeError: a step is under way; its workers wait for gradients, not for this. Or the
                line has `same_bits`: use `line.tally`.
            LineHalted: the line stopped.
        """
        return self._together.mean(value, weight)

    def tally(
        self, value: float | torch.Tensor | Mapping[str, float | torch.Tensor], n: float
    ) -> None:
        """Adds sums over the present batch of `line.split`, on a line with `same_bits`.

        ```python
        for x, y in line.split(val_loader):
            line.tally(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        val_loss = line.tallied()
        ```

        Args:
            value: a sum over the batch, or several by name.
            n: number of terms in it.

        Raises:
            RuntimeError: there is no batch to tally, or the line is not one of `same_bits`.
            ValueError: `n` is negative or not finite.
        """
        self._together.tally(value, n)

    def tallied(self) -> float | dict[str, float]:
        """Returns the mean of what was tallied in the last loop over `line.split`.

        It has the same bits on every worker, and whatever the workers are: the sums are added in
        the order of the batches, in float64.

        Raises:
            RuntimeError: the loop was not run to its end, a batch was not tallied, or the line is
                not one of `same_bits`.
            ValueError: batches were tallied under different names.
        """
        return self._together.tallied()

    def gather(self, value: Any) -> Any:
        """Returns what all workers give, concatenated in the order of ranks, on every worker.

        Every worker must call it. Integers, float64 and booleans arrive exactly.

        Between two steps it is meant for small values: metrics, predictions of a validation set.
        Before its first step a worker gets only its own, as it evaluates everything then.

        ```python
        predicted = line.gather(torch.cat(predicted))  # of all samples, in the loader's order
        ranks = line.gather(line.rank)  # tensor([0, 1])
        ```

        In the body of a training loop, before `line.backward`, it is differentiable, for losses
        that compare samples with each other. Compute the same loss of all rows on every worker:
        the mean over workers is then the gradient of one process with the whole batch. In a step
        that is void it returns this worker's own rows.

        ```python
        z = line.gather(F.normalize(model(x), dim=1))
        line.backward(contrastive_loss(z))
        ```

        Args:
            value: a tensor of shape (n, ...), where n may differ from worker to worker; a number
                or a tensor without dimensions, which counts as n = 1; or lists, tuples and dicts
                of them, of the same structure on every worker. At most 16 MiB.

        Returns:
            The same structure of tensors, of shape (sum of all n, ...), on the device of `value`;
            those of numbers are on the CPU.

        Raises:
            TypeError: there is something else in the value.
            ValueError: the value is too large, or the workers' structures, dtypes or shapes differ.
            RuntimeError: the loop body has gone backward, or has a part of this worker's share;
                the schedule or the host can't gather in a loop body; the line's service is too old.
            LineHalted: the line stopped, or a row with a gradient is not finite.
        """
        return self._together.gather(value)

    def best(
        self, value: float, mode: Literal["min", "max"] = "min", patience: int | None = None
    ) -> bool:
        """Returns whether an evaluation is the best so far: the same on every worker.

        Every worker must call it, between two steps, once for each evaluation. The best value is
        in checkpoints and goes to new workers. If the run has a folder, the checkpoint of the best
        step is written and kept, and `checkpoints/best` leads to it.

        ```python
        if line.best(val_loss, patience=3) and line.is_main:
            print("best so far:", val_loss)
        ```

        Args:
            value: what `line.mean` returned; nan is never the best.
            mode: whether the smallest or the greatest value is the best.
            patience: calls `line.stop` after so many evaluations without a better one; None: never.

        Raises:
            ValueError: the mode is neither `min` nor `max`.
            RuntimeError: a step is under way.
            LineHalted: the line stopped.
        """
        return self._together.best(value, mode, patience)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Shows in `andon status` what this worker does while the others wait for it.

        A worker is never dropped for being slow; this only tells people why.

        ```python
        with line.busy("upload"):
            upload(model)
        ```

        Args:
            what: a few words.
        """
        return self._together.busy(what)

    # ------------------ what people see

    def log(self, values: Mapping[str, SupportsFloat | torch.Tensor]) -> None:
        """Logs numbers beside `line.step`: a validation loss, a learning rate, a temperature.

        Any worker may call it, at any time after `prepare` or `join`; others need not. On a line
        the numbers go to the journal, the board and Prometheus, and `andon export` gives them out.
        What several workers log under one name is shown as their mean. Alone, a run with a folder
        gets a file `scalars.csv`. `Line(log_to=...)` writes a file in both cases.

        ```python
        line.log({"val/loss": val, "lr": scheduler.get_last_lr()[0]})
        ```

        Args:
            values: numbers or tensors of one element, by name; NaN and infinity are allowed. A name
                has at most 64 letters, digits and characters `_ . / -`. A run has at most 64 names;
                of further ones a warning tells once. A second number of the same name, worker and
                step replaces the first. To read a tensor of a GPU waits for the GPU.

        Raises:
            ValueError: a name or a value is none of these.
            RuntimeError: the script has not called `prepare` or `join`, or closed the line.
        """
        self._logs.log(values)

    @property
    def logged(self) -> dict[str, float]:
        """The last number of each name that this process logged."""
        return dict(self._logs.last)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = False,
    ) -> None:
        """Prints on the worker that has rank 0 now, and on no other; see `is_main`.

        The arguments are those of Python's `print`.

        ```python
        line.print("validation loss", val)
        ```
        """
        if self.is_main:
            builtins.print(*values, sep=sep, end=end, file=file, flush=flush)

    # ------------------ where this worker and its line stand

    @property
    def same_bits(self) -> bool:
        """Whether the weights are to have the same bits on any number of workers."""
        return self._session.worker.config.same_bits

    @property
    def device(self) -> torch.device:
        """The device that this worker computes on."""
        return self._session.device

    @property
    def rank(self) -> int:
        """This worker's rank, from 0; it can change between steps, as workers come and go.

        A worker that follows without a share, such as a spare, has `world_size` in place of a rank.
        Before the worker has joined it is the launcher's `RANK`, or 0. In a host whose processes
        average by DistributedDataParallel each process has a rank of its own, and every host must
        have as many processes.
        """
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the current step; it can change between steps.

        Before the worker has joined it is the launcher's `WORLD_SIZE`, or 1. Processes of a host
        that average by DistributedDataParallel count each.
        """
        return self._session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this worker has rank 0; another worker may have it in the next step."""
        return self._session.rank == 0

    @property
    def step(self) -> int:
        """Number of steps committed so far; a resumed run counts on from its checkpoint."""
        return self._session.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._session.epoch

    @property
    def complete(self) -> bool:
        """Whether the run is over: every wanted step is committed."""
        return self._session.complete

    @property
    def stopped(self) -> str:
        """Why the run ends, for example `steps` or `drained`; empty while it goes on."""
        return self._session.stopped

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()`, or `should_commit()`, committed the step."""
        steps = self._session.steps
        return steps is not None and steps.committed

    @property
    def local_steps(self) -> int:
        """How many optimizer steps of its own this worker gave to the last committed step.

        On local steps they are those of the window, without those that it made ahead of it; 0 if it
        had no part in the window. On other schedules there is one in each step.
        """
        steps = self._session.stepper
        return 1 if steps is None else steps.local_steps

    @property
    def overflowed(self) -> bool:
        """Whether the last step was committed and moved no weight, since gradients overflowed.

        It is the same on every worker, and only with a prepared GradScaler ever true.
        """
        steps = self._session.stepper
        return steps is not None and steps.committed and steps.overflowed

    @property
    def _last_commit(self) -> Committed | None:
        """The last commit that the stepper has seen."""
        steps = self._session.stepper
        return steps.last_commit if steps else None

    @property
    def loss(self) -> float | None:
        """Mean loss of the last committed step over all workers, each counted by its weight.

        None before the first commit, and in a script with manual steps.
        """
        return commit.loss if (commit := self._last_commit) else None

    @property
    def step_samples(self) -> int:
        """Number of samples in the last committed step, of all workers together.

        0 before the first commit, and in a script with manual steps.
        """
        return commit.samples if (commit := self._last_commit) else 0

    @property
    def step_epoch(self) -> int:
        """The epoch of the last committed step, from 0; `epoch` is that of the next one.

        0 before the first commit, and in a script with manual steps.
        """
        return commit.epoch if (commit := self._last_commit) else 0

    @property
    def accuracy(self) -> float | None:
        """Fraction of the last committed step's samples that the model got right, from 0 to 1.

        None before the first commit, in a script with manual steps, and unless every worker
        passes `correct` to `line.backward` for every batch.
        """
        return commit.accuracy if (commit := self._last_commit) else None

    @property
    def seed(self) -> int:
        """Seed of the sample order; the same on all workers."""
        return self._session.worker.config.seed

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run's files; None if the run keeps none."""
        return self._session.worker.config.run_dir

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the last checkpoint that this worker wrote; None if it wrote none.

        One that is still being written does not count.
        """
        return self._session.worker.checkpoints.last

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """Folders of all checkpoints that this worker wrote, in order; older ones may be gone."""
        return tuple(self._session.worker.checkpoints.written)
