"""torchrun with the backend "andon" and nothing else: rank 0 serves, a halt starts all again."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.trace import read_part
from integration.fixtures.console import finish, start_torchrun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "script.py"


def services_of(folder: Path) -> list[str]:
    """The command lines of services that have this working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.joinpath("cwd").resolve() == folder:
                found.append(process.joinpath("cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_nan_ends_the_ranks_with_code_3_and_the_next_attempt_trains(tmp_path: Path) -> None:
    # Its own: in the one of all processes other tests make and remove files meanwhile.
    shared = tmp_path / "shared"
    shared.mkdir()
    untouched = shared.stat().st_mtime_ns
    command = ["--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPT), str(tmp_path)]

    trace = str(tmp_path / "t.json")
    where = {"ANDON_TRACE": trace, "ANDON_SHARED_DIR": str(shared)}
    code, _, errors = finish(start_torchrun(tmp_path, *command, **where))

    assert code == 0, errors
    assert "exitcode: 3" in errors
    assert "rank 1 on" in errors
    assert "gave nan in" in errors
    lines = {each.name: len(each.read_text().split()) for each in tmp_path.glob("[01]-[01]")}
    assert lines == {"0-0": 2, "0-1": 2, "1-0": 4, "1-1": 4}
    # Each rank of each attempt has its part of the trace, with the steps that it made.
    parts = [read_part(each) for each in (tmp_path / "t.json.parts").iterdir()]
    steps = [sum(each.name == "backward" for each in part.events) for part in parts]
    assert sorted(part.worker for part in parts if part.worker is not None) == [0, 0, 1, 1]
    assert sorted(steps) == [3, 3, 4, 4]
    # Python ended the group: nothing is left.
    assert services_of(tmp_path) == []
    assert shared.stat().st_mtime_ns > untouched
    assert list(shared.iterdir()) == []
