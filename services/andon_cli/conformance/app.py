"""`andon conformance`: runs one of its subverbs."""

from __future__ import annotations

from andon_cli.conformance.config import ConformanceConfig, RunnerConfig

__all__ = ["conform"]


async def conform(config: ConformanceConfig) -> int:
    """Runs the subverb that a configuration is of; its exit code."""
    match config:
        case RunnerConfig():
            from andon_cli.conformance.runner import judge_server

            return await judge_server(config)
        case _:
            raise AssertionError(f"no subverb has a {type(config).__name__}")
