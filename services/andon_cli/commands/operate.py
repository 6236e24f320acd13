"""`andon halt`, `andon resume` and `andon drain`: an operator stops, continues or ends a run."""

from __future__ import annotations

import json
import os
import pwd
import socket

from andon.host.errors import ExitCode, LineRefused
from andon.protocol.halts import HaltAnswer
from andon_cli.client import LineClient, LineStatus
from andon_cli.commands.status import status_json
from andon_cli.drawing.texts import evidence_fields
from andon_cli.questions import DrainConfig, HaltConfig, ResumeConfig
from andon_cli.target import find_target

__all__ = [
    "drain_line",
    "drained_text",
    "halt_line",
    "operator_name",
    "resume_line",
    "resumed_text",
]


async def halt_line(config: HaltConfig) -> int:
    """Stops the line. Returns the exit code.

    Raises:
        CommandError: the line can't be reached, or refuses to stop.
    """
    target = find_target(config.address, config.run)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        halt = await client.halt(config.reason, operator_name())
        session = (await client.status()).session
    if config.format == "json":
        print(json.dumps(evidence_fields(halt)))
    elif session is not None:
        print(f"the session is over after step {halt.step}: its ranks exit with code 3")
    else:
        print(f"halted at step {halt.step}, before its commit")
    return ExitCode.COMPLETE


async def resume_line(config: ResumeConfig) -> int:
    """Answers the present halt. Returns the exit code.

    Raises:
        CommandError: the line can't be reached, is not halted, or can't go on this way.
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
        # Answer the halt that the person has seen. If another one came in between, the coordinator
        # refuses the answer.
        halt_id = before.halt.id if config.halt is None else config.halt
        after = await client.resume(halt_id, answer, worker=config.drop, operator=operator_name())
    if config.format == "json":
        print(status_json(after))
    else:
        print(resumed_text(before.halt.step, before.attempt, answer, config.drop))
    return ExitCode.COMPLETE


async def drain_line(config: DrainConfig) -> int:
    """Ends the run after the current step, and does not wait for it. Returns the exit code.

    Raises:
        CommandError: the line can't be reached.
    """
    target = find_target(config.address, config.run)
    async with LineClient(target.address, run_id=target.run_id, access=config.access) as client:
        after = await client.drain(operator_name())
    print(status_json(after) if config.format == "json" else drained_text(after))
    return ExitCode.COMPLETE


def drained_text(status: LineStatus) -> str:
    """What the drain does now, such as `finishing step 140; checkpoint; workers leave`.

    Only runs that write checkpoints write one.
    """
    if status.state == "COMPLETE":
        return f"run {status.run_id} is over already, after step {status.step}"
    if status.stop_reason:
        return f"no step to finish after step {status.step}; workers leave"
    return f"finishing step {status.step + 1}; checkpoint; workers leave"


def resumed_text(step: int, attempt: int, answer: HaltAnswer, worker: int | None = None) -> str:
    """The answer in words, such as `resumed: step 131, attempt 1`."""
    match answer:
        case HaltAnswer.RETRY:
            return f"resumed: step {step}, attempt {attempt}"
        case HaltAnswer.SKIP:
            return f"resumed: step {step}, with the next samples; its own are recorded as skipped"
        case HaltAnswer.DROP:
            return f"resumed: step {step}, attempt {attempt}, without worker {worker}"


def operator_name() -> str:
    """The person who runs the command, as user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _answer(config: ResumeConfig) -> HaltAnswer:
    if config.skip:
        return HaltAnswer.SKIP
    return HaltAnswer.RETRY if config.drop is None else HaltAnswer.DROP
