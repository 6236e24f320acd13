"""The trial: a whole run of one step, on a service that is started for it and ends with it."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from andon.host.access import CLEAR, Access
from andon.protocol.run_settings import RunPlan
from andon.testing import ScriptedWorker, Unexpected, small_layout
from andon_cli.commands.doctor.findings import Finding, fail, healthy, ok
from andon_cli.commands.doctor.reach import check_line
from andon_cli.launching.processes import Child, start_service
from andon_coordinator.config import LineOptions
from andon_coordinator.transport.store import JournalError
from andon_server.book import RunBook
from andon_server.runs import JOURNAL, ServiceAddress
from andon_server.settings import ServeConfig

__all__ = ["check_trial"]

_RUN = "doctor"
_PATIENCE_S = 30.0
_GRACE_S = 5.0
_ELEMENTS = 2**16
_SAMPLES = 4
_PLAN = RunPlan(global_batch=_SAMPLES, dataset_size=_SAMPLES, total_steps=1)


class TrialFailed(Exception):
    """The line broke the protocol: a sentence that says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    """How long one step took."""

    step_s: float
    """From the assignment to the commit."""
    exchange_s: float
    """From sending the chunk to receiving its average."""
    payload_bytes: int


async def check_trial(access: Access = CLEAR) -> list[Finding]:
    """Starts a service, reaches it, trains one step, and reads the journal that it leaves."""
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="andon-doctor-") as name:
        folder, trusted = Path(name), Access(tls_dir=access.tls_dir)
        service, announced = await start_service(_config(folder, trusted), said.append)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                announcement = await announced.readline()
                return await _try(service, announcement, folder, said, trusted)
        except TimeoutError:
            return [
                _failed(f"a line of one worker did not finish within {_PATIENCE_S:.0f} s", said)
            ]
        finally:
            await service.end(grace_s=_GRACE_S)


async def _try(
    service: Child, announcement: bytes, folder: Path, said: list[str], access: Access
) -> list[Finding]:
    try:
        address = ServiceAddress.from_json(announcement.decode()).address
    except ValueError:
        code = await service.wait()
        return [_failed(f"`andon serve` ended with exit code {code} before it served", said)]
    findings = await check_line(address, access)
    if not healthy(findings):
        return findings
    try:
        trial = await train_one_step(address, _RUN, access.tls_dir)
    except TrialFailed as error:
        return [*findings, _failed(f"one step through the reducer failed: {error}", said)]
    code = await service.wait()
    return [*findings, _judge(trial, code, folder / JOURNAL, said)]


def _judge(trial: TrialStep, code: int, journal: Path, said: list[str]) -> Finding:
    """The finding on the trial, after the service's exit code and its journal."""
    if code != 0:
        return _failed(f"the service of a complete line ended with exit code {code}", said)
    try:
        book = RunBook.read(journal)
    except JournalError as error:
        return _failed(f"the journal does not hold the step ({error})", said)
    if book.steps != 1 or not book.complete:
        return _failed(f"the journal holds {book.steps} steps of a run of one", said)
    return ok(
        "trial",
        f"a step through coordinator, reducer and journal: {trial.payload_bytes // 1024} KiB back "
        f"bit for bit in {trial.exchange_s * 1000:.1f} ms, committed in "
        f"{trial.step_s * 1000:.1f} ms",
    )


def _failed(fact: str, said: list[str]) -> Finding:
    """A failure of the service, with the last line of its output."""
    said_last = f" (its last output: {said[-1]})" if said else ""
    return fail(
        "trial",
        f"{fact}{said_last}",
        "fix what fails above, or report it: `andon serve` shows the service's whole output",
    )


def _config(folder: Path, access: Access) -> ServeConfig:
    return ServeConfig(
        run_id=_RUN,
        run_dir=str(folder),
        port=0,
        metrics_port=0,
        line=LineOptions(max_steps=1),
        until_complete=True,
        announce=True,
        access=access,
    )


async def train_one_step(address: str, run_id: str, tls: Path | None = None) -> TrialStep:
    """Joins a line as its only worker, takes one step through the reducer, and leaves.

    The mean of one contribution is that contribution, bit by bit; the trial compares every bit.

    Raises:
        TrialFailed: the line did something else.
    """
    layout = small_layout(_ELEMENTS)
    worker = ScriptedWorker(address, run_id, _PLAN, slot=0, layout=layout, tls=tls)
    try:
        return await _train(worker)
    except grpc.aio.AioRpcError as error:
        text = f"a stream ended with {error.code().name}: {error.details()}"
        raise TrialFailed(text) from error
    except Unexpected as error:
        raise TrialFailed(str(error)) from error


async def _train(worker: ScriptedWorker) -> TrialStep:
    gradient = trial_numbers()
    await worker.join()
    await worker.open_reducer()
    await _take_record(worker, 0)
    work = (await worker.expect("shard_assignment")).shard_assignment
    began = time.perf_counter()
    answer = await worker.average(work, gradient.tobytes())
    exchanged = time.perf_counter()
    average = answer.averaged_block
    if average.payload != gradient.tobytes():
        raise TrialFailed("the mean of one contribution is not that contribution, bit by bit")
    await worker.ready(work, total_weight=average.total_weight, world_size=average.world_size)
    await _take_record(worker, 1)
    committed = time.perf_counter()
    worker.digest = hashlib.sha256((-gradient).tobytes()).digest()
    await worker.leave()
    return TrialStep(
        step_s=committed - began, exchange_s=exchanged - began, payload_bytes=gradient.nbytes
    )


async def _take_record(worker: ScriptedWorker, step: int) -> None:
    committed = (await worker.expect("step_committed")).step_committed
    if committed.record.step != step:
        raise TrialFailed(f"step {committed.record.step} was committed in place of step {step}")
    await worker.apply(committed)


def trial_numbers() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A gradient of all kinds of finite numbers: signed zeros, the smallest, the largest."""
    special = np.array([0.0, -0.0, 1.0, -1.5, 1e-45, -1e-45], np.float32)
    largest = np.finfo(np.float32).max
    numbers = np.random.default_rng(7).standard_normal(_ELEMENTS).astype(np.float32)
    numbers[: special.size] = special
    numbers[special.size : special.size + 2] = [largest, -largest]
    return numbers
