"""How much memory is left: for this process, not for the whole machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.host.memory import available_bytes

MIB = 2**20


def files(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group(version: int, limit: str, used: int, files: int = 0) -> dict[str, str]:
    if version == 2:
        stat = f"anon 1\ninactive_file {files}\n"
        return {"memory.max": limit, "memory.current": str(used), "memory.stat": stat}
    stat = f"cache 1\ninactive_file 7\ntotal_inactive_file {files}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used), "memory.stat": stat}


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("", {}, 1000),
        ("0::/a/b\n", {"a/b": group(2, f"{300 * MIB}\n", 100 * MIB, 50 * MIB)}, 250),
        ("0::/a/b\n", {"a/b": group(2, "max\n", 0), "a": group(2, f"{90 * MIB}", 60 * MIB)}, 30),
        ("0::/a\n", {"a": group(2, f"{5000 * MIB}", 60 * MIB)}, 1000),
        ("0::/a\n", {"a": group(2, f"{10 * MIB}", 60 * MIB)}, 0),
        ("0::/\n", {".": group(2, f"{10 * MIB}", 6 * MIB)}, 4),
        ("4:cpu,memory:/a\n", {"memory/a": group(1, f"{300 * MIB}", 100 * MIB, 50 * MIB)}, 250),
        ("4:memory:/on/the/host\n", {"memory": group(1, f"{300 * MIB}", 100 * MIB)}, 200),
        ("4:memory:/a\n", {"memory/a": group(1, str(2**63 - 4096), 100 * MIB)}, 1000),
        ("4:cpu:/a\n", {"cpu/a": group(1, f"{300 * MIB}", 100 * MIB)}, 1000),
        ("0::/a\n", {"a": {"memory.max": "1"}}, 1000),
    ],
)
def test_what_is_left_is_the_least_of_the_machine_and_of_every_group_with_a_limit(
    tmp_path: Path, own: str, groups: dict[str, dict[str, str]], left: int
) -> None:
    files(tmp_path, {"meminfo": f"MemTotal: 1\nMemAvailable: {1000 * 1024} kB\n", "own": own})
    for path, texts in groups.items():
        files(tmp_path / "cgroup" / path, texts)

    found = available_bytes(tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup")

    assert found == left * MIB
