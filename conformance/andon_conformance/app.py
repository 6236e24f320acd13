"""`andon conformance`: runs one of its subverbs."""

from __future__ import annotations

from andon_conformance.judge.config import JudgeConfig
from andon_conformance.runner.config import RunnerConfig
from andon_conformance.subverb import ConformanceConfig

__all__ = ["conform"]


async def conform(config: ConformanceConfig) -> int:
    """Runs the subverb that a configuration is of; its exit code."""
    match config:
        case RunnerConfig():
            from andon_conformance.runner.app import judge_server

            return await judge_server(config)
        case JudgeConfig():
            from andon_conformance.judge.app import judge_client

            return await judge_client(config)
        case _:
            raise AssertionError(f"no subverb has a {type(config).__name__}")
