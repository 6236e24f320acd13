"""The `andon` command: reads its configuration, runs one verb, and ends with its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from andon_cli.config import Config, RunConfig, ServeConfig, read_config
from andon_cli.errors import ConsoleError, ExitCode

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `andon` command and returns its exit code."""
    try:
        return asyncio.run(_run(read_config(argv)))
    except ConsoleError as error:
        print(f"andon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


async def _run(config: Config) -> int:
    # Imported late: `andon status` needs no server, and `andon serve` no screen.
    if isinstance(config, RunConfig):
        from andon_cli.run import run

        return await run(config)
    if isinstance(config, ServeConfig):
        from andon_cli.serve import serve

        return await serve(config)
    from andon_cli.status import show_status

    return await show_status(config)
