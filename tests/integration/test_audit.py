"""`andon audit`: a run is recomputed, and one wrong step in it is found.

It has 48 steps, and 500 with ANDON_AUDIT, as in `make soak`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon_cli.app import main
from integration.harness import SCRIPTS, train

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEPS = 500 if os.environ.get("ANDON_AUDIT") else 48
WRONG, DIES_AT = STEPS * 5 // 8, STEPS // 2
FLAGS = ("--same-bits", "--digest-every", "1")


def trained(folder: Path, python: list[str]) -> list[str]:
    """Trains with a wrong bit; returns the words that audit that with the script as it should be.

    The audit's script writes no result: its folder has none afterwards.
    """
    folder.mkdir()
    more: dict[str, Any] = {"ANDON_RUN_DIR": f"{folder}/run", "ANDON_CHECKPOINT_EVERY": str(WRONG)}
    train(folder, {"steps": STEPS, "wrong": WRONG}, 1, *FLAGS, script="audited.py", **more)
    return words_of(folder, {"steps": STEPS}, python)


def words_of(folder: Path, spec: dict[str, Any], python: list[str]) -> list[str]:
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [*python, str(SCRIPTS / "audited.py"), str(folder / "spec.json")]
    return ["audit", str(folder / "run"), "--format", "json", "--", *command, str(folder / "out")]


def test_one_bit_that_is_wrong_after_one_step_is_found_also_if_the_audit_is_interrupted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forked_python: list[str],
) -> None:
    words = trained(tmp_path / "bad", forked_python)
    words[2:2] = ["--own-checkpoint-every", str(STEPS // 5)]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "bad").rglob("*")}

    monkeypatch.setenv("AUDITED_DIES_AT", str(DIES_AT))
    assert main(words) == 4
    assert (
        f"stopped at step {DIES_AT} of {STEPS}: it ended with exit code 7"
        in capsys.readouterr().err
    )
    monkeypatch.delenv("AUDITED_DIES_AT")
    assert main(words) == 1

    fields: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert "went on from its own checkpoint" in fields["notes"][0]
    difference = fields["difference"]
    assert (difference["step"], difference["what"]) == (WRONG, "weights")
    assert difference["weights_equal_after"] == WRONG - 1
    assert (difference["parameter"], difference["element"]) == ("0.weight", [0, 0])
    there, here = map(np.float32, difference["values"])
    assert there.view(np.int32) ^ here.view(np.int32) == 1
    # The run is as it was, and what stands behind the script's loop did not run.
    assert not (tmp_path / "bad" / "out").exists()
    changed = [path for path, at in files.items() if path.stat().st_mtime_ns != at]
    assert changed == [tmp_path / "bad" / "run"]


def test_a_run_without_same_bits_is_recomputed_to_a_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_python: list[str]
) -> None:
    spec: dict[str, Any] = {"steps": 25, "same_bits": False, "dropout": 0.0}
    train(tmp_path, spec, 2, script="audited.py")

    assert main(words_of(tmp_path, spec, forked_python)) == 0

    fields = json.loads(capsys.readouterr().out)
    assert (fields["first"], fields["last"], fields["weights_known"]) == (1, 20, 0)
    assert 0 <= fields["farthest"] < fields["tolerance"] == 1e-3
    assert fields["verdict"].startswith("steps 1 to 20 recomputed: no loss differs by more than")
