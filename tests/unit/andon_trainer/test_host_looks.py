"""What a host and a container withhold from a worker, by recorded files of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.protocol.slowness import ProcessFacts
from andon_trainer.exchange.control.host_looks import (
    host_facts,
    lacks_something,
    look_at_host,
    look_at_others,
    who_has_it,
)

ME, CHILD = 100, 101
PRESSURE = "some avg10=9.00 avg60=4.00 avg300=1.00 total={}\nfull avg10=0.00 total=1\n"


def record(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def process(pid: int, name: str, ticks: int, pages: int) -> dict[str, str]:
    stat = f"{pid} ({name}) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 9 {pages} 18446744\n"
    return {f"proc/{pid}/stat": stat}


def seconds_apart(root: Path, before: dict[str, str], after: dict[str, str]) -> ProcessFacts:
    """The facts of two looks, a second apart."""
    own = {ME, CHILD}
    record(root, before)
    host, others = look_at_host(root, lambda: 1.0), look_at_others(own, root, lambda: 1.0)
    record(root, after)
    facts = host_facts(ProcessFacts(), host, look_at_host(root, lambda: 2.0))
    return who_has_it(facts, others, look_at_others(own, root, lambda: 2.0), root)


def test_the_program_that_takes_the_cores_is_named_with_all_its_processes(tmp_path: Path) -> None:
    names = {ME: "python", CHILD: "python", 7: "stress (x)", 8: "stress (x)", 9: "java"}
    before, after = [
        {key: text for pid, name in names.items() for key, text in process(
            pid, name, {7: 90, 8: 60, 9: 5}.get(pid, 99) * second, 2**20 if pid == 9 else 5
        ).items()}
        for second in (1, 2)
    ]  # fmt: skip

    facts = seconds_apart(
        tmp_path,
        {**before, "proc/stat": "cpu  100 0 50 900 0 0 0 30 0 0\ncpu0 1 1\n"},
        {**after, "proc/stat": "cpu  250 0 70 905 0 0 0 80 0 0\ncpu0 2 2\n"},
    )

    assert (facts.busiest, facts.busiest_cores) == ("stress (x) (2 processes, such as 7)", 1.5)
    assert (facts.largest, facts.largest_bytes) == ("java (process 9)", 2**32)
    assert facts.host_busy_cores == pytest.approx(1.7)
    assert facts.stolen_cores == 0.5


def test_a_program_that_was_started_as_the_worker_is_said_to_be(tmp_path: Path) -> None:
    command = {"proc/self/cmdline": "python\0train.py\0", "proc/7/cmdline": "python\0train.py\0"}

    facts = seconds_apart(
        tmp_path, {**process(7, "python", 0, 5), **command}, process(7, "python", 80, 5)
    )

    assert facts.busiest == "python, started as this worker is (process 7)"


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_above_the_own_group_holds_it_back(tmp_path: Path, version: int) -> None:
    if version == 2:
        pod = "sys/fs/cgroup/pod"
        files = {
            "proc/self/cgroup": "0::/pod/worker\n",
            f"{pod}/worker/cpu.max": "max 100000\n",
            f"{pod}/worker/cpu.stat": "usage_usec 9\nthrottled_usec 0\n",
            f"{pod}/worker/cpu.pressure": PRESSURE.format(1_000_000),
            f"{pod}/cpu.max": "50000 100000\n",
        }
        name = "throttled_usec {}00"
    else:
        pod = "sys/fs/cgroup/cpu,cpuacct"  # The path is of the host, and not to be seen from here.
        files = {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/docker/ab12\n0::/\n",
            f"{pod}/cpu.cfs_quota_us": "50000\n",
            f"{pod}/cpu.cfs_period_us": "100000\n",
            "proc/pressure/cpu": PRESSURE.format(1_000_000),
        }
        name = "throttled_time {}00000"
    pressed = next(each for each in files if "pressure" in each)

    facts = seconds_apart(
        tmp_path,
        {**files, f"{pod}/cpu.stat": name.format(1000)},
        {f"{pod}/cpu.stat": name.format(8000), pressed: PRESSURE.format(1_250_000)},
    )

    assert facts.allowed_cores == 0.5
    assert facts.throttled == pytest.approx(0.7)
    assert facts.cpu_pressure == pytest.approx(0.25)


def test_what_a_host_does_not_say_is_left_out(tmp_path: Path) -> None:
    facts = seconds_apart(tmp_path, {}, {})

    assert (facts.host_busy_cores, facts.throttled, facts.cpu_pressure) == (None, None, None)
    assert (facts.busiest, facts.largest) == ("", "")


@pytest.mark.parametrize(
    ("facts", "lacks"),
    [
        (ProcessFacts(waited_for_core=0.02, cpu_pressure=1.0), False),
        (ProcessFacts(cpu_pressure=0.9), True),
        (ProcessFacts(waited_for_core=0.0, threads_waited=0.6), True),
        (ProcessFacts(major_faults=3.0), True),
    ],
)
def test_all_processes_are_looked_at_only_where_something_is_lacking(
    facts: ProcessFacts, *, lacks: bool
) -> None:
    assert lacks_something(facts) is lacks
