"""`andon why`: who was slow and why, of a run that is served or of one that is over."""

from __future__ import annotations

from andon.host.errors import ExitCode, LineUnreachable
from andon.host.strict_json import strict_json
from andon.protocol.limits import on_one_line
from andon.protocol.slowness import Slowness
from andon_cli.client import LineClient
from andon_cli.commands.run_facts import find_folder, reading
from andon_cli.drawing.slow_texts import slow_fields, slow_lines
from andon_cli.questions import WhyConfig
from andon_cli.target import find_target

__all__ = ["show_why"]


async def show_why(config: WhyConfig) -> int:
    """Shows it, the newest last. Returns the exit code.

    Raises:
        UsageError: there is no such run.
        LineUnreachable: no line is served at the address.
        JournalError: the journal of a run that is over can't be read.
    """
    found = await _found(config)
    if config.worker is not None:
        found = [each for each in found if each.worker == config.worker]
    if config.settings.format == "json":
        print(strict_json([slow_fields(each) for each in found]))
        return ExitCode.COMPLETE
    never = "nobody held the others up for long enough to be asked why"
    if config.worker is not None:
        never = (
            f"not known: worker {config.worker} held the others up for long enough to be asked "
            "why, so far not once"
        )
    print("\n".join(map(on_one_line, slow_lines(found) or [never])))
    return ExitCode.COMPLETE


async def _found(config: WhyConfig) -> list[Slowness]:
    settings = config.settings
    try:
        target = find_target(settings.address, settings.run)
    except LineUnreachable:
        if settings.address:
            raise
        return _journalled(settings.run)
    async with LineClient(target.address, run_id=target.run_id, access=settings.access) as client:
        status = await client.status()
    # The last one of each worker comes with its stacks.
    whole = {
        (each.slowness.worker, each.slowness.at_unix_s): each.slowness
        for each in status.workers
        if each.slowness is not None
    }
    return [whole.get((each.worker, each.at_unix_s), each) for each in status.slowness]


def _journalled(run: str) -> list[Slowness]:
    with reading(find_folder(run)) as reader:
        return reader.slownesses()
