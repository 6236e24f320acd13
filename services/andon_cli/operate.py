"""`andon halt`, `andon resume`, `andon drain`: a person stops the line, lets it go on, ends it."""

from __future__ import annotations

import json
import os
import pwd
import socket

from andon.host.errors import ExitCode, LineRefused
from andon.protocol.halts import HaltAnswer
from andon_cli.client import LineClient, LineStatus
from andon_cli.questions import DrainConfig, HaltConfig, ResumeConfig
from andon_cli.status import status_json
from andon_cli.target import find_target
from andon_cli.texts import evidence_fields

__all__ = [
    "drain_line",
    "drained_text",
    "halt_line",
    "operator_name",
    "resume_line",
    "resumed_text",
]


async def halt_line(config: HaltConfig) -> int:
    """Stops the line; the exit code.

    Raises:
        CommandError: the line can't be reached, or does not stop.
    """
    target = find_target(config.address, config.run)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        halt = await client.halt(config.reason, operator_name())
    if config.format == "json":
        print(json.dumps(evidence_fields(halt)))
    else:
        print(f"halted at step {halt.step}, before its commit")
    return ExitCode.COMPLETE


async def resume_line(config: ResumeConfig) -> int:
    """Answers the present halt; the exit code.

    Raises:
        CommandError: the line can't be reached, is not halted, or can't go on so.
    """
    target = find_target(config.address, config.run)
    answer = _answer(config)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        before = await client.status()
        if before.halt is None:
            raise LineRefused(
                f"run {before.run_id} is not halted ({before.state}, step {before.step}): "
                "there is nothing to answer"
            )
        halt_id = before.halt.id if config.halt is None else config.halt
        after = await client.resume(halt_id, answer, worker=config.drop, operator=operator_name())
    if config.format == "json":
        print(status_json(after))
    else:
        print(resumed_text(before.halt.step, before.attempt, answer, config.drop))
    return ExitCode.COMPLETE


async def drain_line(config: DrainConfig) -> int:
    """Ends the run after the present step, without waiting for that; the exit code.

    Raises:
        CommandError: the line can't be reached.
    """
    target = find_target(config.address, config.run)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        after = await client.drain(operator_name())
    print(status_json(after) if config.format == "json" else drained_text(after))
    return ExitCode.COMPLETE


def drained_text(status: LineStatus) -> str:
    """What a drain does now, such as `finishing step 140; checkpoint; workers leave`.

    The checkpoint is that of runs that write any.
    """
    if status.state == "COMPLETE":
        return f"run {status.run_id} is over already, after step {status.step}"
    if status.stop_reason:
        return f"no step to finish after step {status.step}; workers leave"
    return f"finishing step {status.step + 1}; checkpoint; workers leave"


def resumed_text(step: int, attempt: int, answer: HaltAnswer, worker: int | None = None) -> str:
    """What was answered, such as `resumed: step 131, attempt 1`."""
    match answer:
        case HaltAnswer.RETRY:
            return f"resumed: step {step}, attempt {attempt}"
        case HaltAnswer.SKIP:
            return f"resumed: step {step}, with the next samples; those it had count as skipped"
        case HaltAnswer.DROP:
            return f"resumed: step {step}, attempt {attempt}, without worker {worker}"


def operator_name() -> str:
    """Who is at this console, as user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _answer(config: ResumeConfig) -> HaltAnswer:
    if config.skip:
        return HaltAnswer.SKIP
    return HaltAnswer.RETRY if config.drop is None else HaltAnswer.DROP
