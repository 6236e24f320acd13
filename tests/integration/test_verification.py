"""Steps that are computed twice: who is wrong is found before anything is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.host.errors import ExitCode
from integration.harness import await_exit, finish, start_line_with_host, train, train_alone

pytestmark = pytest.mark.integration

FLAGS = ("--same-bits", "--verify", "1.0", "--digest-every", "0")
SCRIPT = "verified.py"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a script ends with that is alone and computes right."""
    seen = train_alone(tmp_path_factory.mktemp("alone"), {}, SCRIPT).seen
    return str(seen["weights"])


def test_a_host_with_one_wrong_bit_is_dropped_and_the_others_end_with_the_right_weights(
    tmp_path: Path, weights: str
) -> None:
    flags = *FLAGS, "--min-workers", "1", "--on-wrong-arithmetic", "drop"

    # The bit is wrong in the process that does not speak to the line.
    specs = {"flips": [1, 3]}, dict[str, Any]()
    line = start_line_with_host(tmp_path, specs, 2, *flags, script=SCRIPT)
    with line as (service, processes):
        seen = finish(processes[2:])
        status = service.status().verification

        await_exit(processes[:2], ExitCode.LOST)
        dropped = [each.seen for each in processes[:2]]

    assert [each["weights"] for each in seen] == [weights] * 2
    assert [each["step"] for each in dropped] == [2, 2]
    assert all("computed grain" in each["message"] for each in dropped)
    assert status.steps == 5


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"flips": [1, 3]}, "wrong_arithmetic", ["worker 0 against worker 1", "0.weight[1, 1]"]),
        ({"reads": [1, 29]}, "data_differs", ["position 29"]),
    ],
    ids=["a-wrong-bit", "a-wrong-sample"],
)
def test_two_workers_that_differ_halt_before_the_commit_and_nobody_is_convicted(
    tmp_path: Path, spec: dict[str, Any], reason: str, words: list[str]
) -> None:
    both = train(tmp_path, spec, 2, *FLAGS, script=SCRIPT, expect_exit=3, ANDON_CHECK_DATA="0")

    for seen in both:
        assert [seen["reason"], seen["worker"], seen["step"]] == [reason, None, 2]
        assert all(each in seen["message"] for each in words), seen["message"]
