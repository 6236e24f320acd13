"""Configuration of `andon conformance judge`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from andon_cli.conformance.judge.catalogue import SCENARIOS
from andon_cli.conformance.judge.checks import is_wanted
from andon_cli.errors import UsageError
from andon_cli.questions import Form
from andon_cli.settings import Settings

__all__ = ["JudgeConfig", "judge_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Which client is judged, and by what."""

    command: tuple[str, ...] = ()
    """How the client is started."""
    only: tuple[str, ...] = ()
    """Names of checks or scenarios; empty: all."""
    timeout_s: float = 20.0
    """How long anything that the client must do is waited for."""
    jobs: int = 2
    """Scenarios that are played at once."""
    format: Form = "table"
    """`table` or `json`."""

    def __post_init__(self) -> None:
        """Refuses names that no check has."""
        names = [check.name for scenario in SCENARIOS for check in scenario.checks]
        for name in self.only:
            if not any(is_wanted(known, (name,)) for known in names):
                known_names = ", ".join(scenario.name for scenario in SCENARIOS)
                raise UsageError(
                    f"--only: there is no check and no scenario {name!r}; scenarios are "
                    f"{known_names}, and docs/conformance-clients.md lists their checks"
                )


def judge_config(settings: Settings) -> JudgeConfig:
    """How a client is judged.

    Raises:
        UsageError: no client is named, or it is not there.
    """
    command = settings.command
    if command[:1] == ("--",):
        command = command[1:]
    if not command:
        raise UsageError("name the client: andon conformance judge -- python my_client.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"the client can't be started: there is no {command[0]}")
    once = settings.only_flags()
    return JudgeConfig(
        command=tuple(command),
        only=once.texts("only"),
        timeout_s=once.seconds("timeout", 20.0, least=1.0),
        jobs=once.whole("jobs", 2, least=1, most=64),
        format=settings.choice("format", ("table", "json")),
    )
