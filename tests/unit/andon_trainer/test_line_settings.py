"""The settings of `Line`: each one of the configuration is an argument, typed and passed on."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.config import LineOptions
from andon_trainer import Line
from andon_trainer.config import LineConfig

FOUND = {"andon_run", "audit", "launch"}
"""Found in the environment by `LineConfig.read`, and never given."""


def test_every_setting_is_an_argument_with_a_type_and_a_line_of_documentation() -> None:
    signature = inspect.signature(Line.__init__)
    given = {name: each for name, each in signature.parameters.items() if name != "self"}

    assert given.keys() == {each.name for each in fields(LineConfig)} - FOUND
    for name, each in given.items():
        assert each.kind is inspect.Parameter.KEYWORD_ONLY
        assert each.default is None
        assert each.annotation not in ("Any", inspect.Parameter.empty)
        assert f" {name}: " in (Line.__init__.__doc__ or "")


def test_every_argument_becomes_the_setting_of_its_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "address": "alpha:7070",
        "run_id": "7f3a",
        "seed": 5,
        "on_halt": "wait",
        "log_format": "json",
        "device": "cpu",
        "run_dir": str(tmp_path),
        "checkpoint_every": 7,
        "keep_checkpoints": 2,
        "resume": str(tmp_path / "old"),
        "line_options": LineOptions(encoding="bfloat16"),
        "total_steps": 9,
        "check_data": False,
        "max_overflows": 4,
        "token": b"a-token-of-24-characters",
        "tls": str(tmp_path),
        "insecure": True,
        "launch_slot": 1,
        "launch_size": 2,
        "local_rank": 3,
        "speed_hint": 1.5,
        "spare": True,
        "preemption_notice": str(tmp_path / "notice"),
        "notice_grace_s": 5.0,
        "metrics_bind": "off",
        "metrics_hosts": "alpha",
        "metrics_token_file": str(tmp_path / "metrics-token"),
        "shared_dir": "off",
        "tcp": False,
        "connections": 3,
        "ring_bind": "off",
        "log_to": "tensorboard",
        "trace": str(tmp_path / "trace"),
        "same_bits": True,
        "arithmetic": "tell",
        "checksums": False,
    }

    line = Line(**given)
    line.close()

    config = line._session.worker.config
    paths = ("run_dir", "resume", "tls", "trace", "metrics_token_file")
    assert given.keys() == {each.name for each in fields(LineConfig)} - FOUND
    expected = given | {name: Path(given[name]) for name in paths} | {"shared_dir": None}
    assert {name: getattr(config, name) for name in given} == expected


def test_an_audit_leaves_no_setting_of_the_run_to_the_script(tmp_path: Path) -> None:
    environment = {"ANDON_AUDIT": str(tmp_path / "order"), "ANDON_RUN_DIR": str(tmp_path / "audit")}
    given = {"address": "alpha:7070", "run_dir": tmp_path, "checkpoint_every": 1, "log_to": "csv"}

    config = LineConfig.read(environment, seed=5, **given)

    assert (config.solo, config.run_dir) == (True, tmp_path / "audit")
    assert (config.checkpoint_every, config.log_to, config.seed) == (0, "", 5)


def test_options_of_a_line_that_contradict_each_other_are_refused_before_anybody_serves() -> None:
    with pytest.raises(ValueError, match="line_options: --overlap applies to local steps"):
        LineConfig.read({}, line_options=LineOptions(overlap=True))
