"""The `andon` command: reads its configuration, runs one verb, and ends with its exit code."""

# Each verb is imported when it is run: `andon status` needs no server, `andon serve` no screen,
# and `andon health`, which containers run every few seconds, next to nothing.

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from andon_cli.conformance.config import ConformanceConfig, conformance_config
from andon_cli.errors import ConsoleError, ExitCode
from andon_cli.questions import (
    CertsConfig,
    DoctorConfig,
    DrainConfig,
    HaltConfig,
    HealthConfig,
    HistoryConfig,
    ResumeConfig,
    certs_config,
    health_config,
)
from andon_cli.settings import Settings, read_settings

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `andon` command and returns its exit code."""
    try:
        settings = read_settings(argv)
        if settings.verb == "health":
            from andon_cli.health import show_health

            return show_health(health_config(settings))
        if settings.verb == "conformance":
            from andon_cli.conformance.app import conform

            return asyncio.run(conform(conformance_config(settings)))
        if settings.verb == "certs":
            from andon_cli.certs import make_certificates

            return make_certificates(certs_config(settings))
        return asyncio.run(_run(settings))
    except ConsoleError as error:
        print(f"andon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


async def _run(settings: Settings) -> int:
    from andon_cli.config import RunConfig, ServeConfig, config_of
    from andon_cli.reducer_config import ReducerConfig

    match config_of(settings):
        case RunConfig() as config:
            from andon_cli.run import run

            return await run(config)
        case ServeConfig() as config:
            from andon_cli.serve import serve

            return await serve(config)
        case ReducerConfig() as config:
            from andon_cli.serve_reducer import serve_reducer

            return await serve_reducer(config)
        case HaltConfig() as config:
            from andon_cli.operate import halt_line

            return await halt_line(config)
        case ResumeConfig() as config:
            from andon_cli.operate import resume_line

            return await resume_line(config)
        case DrainConfig() as config:
            from andon_cli.operate import drain_line

            return await drain_line(config)
        case HistoryConfig() as config:
            from andon_cli.history import show_history

            return show_history(config)
        case DoctorConfig() as config:
            from andon_cli.doctor.app import examine

            return await examine(config)
        case HealthConfig() | CertsConfig() | ConformanceConfig():
            raise AssertionError("answered already")
        case config:
            from andon_cli.status import show_status

            return await show_status(config)
