"""The conformance suite: Andon's own server passes, and each broken one fails where it should."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from andon.host.errors import CommandError, LineUnreachable, UsageError
from andon_conformance.app import judge_server
from andon_conformance.config import RunnerConfig
from andon_conformance.reach import Reach
from andon_conformance.runner.app import CHECKS, results_of
from andon_conformance.runner.checks import Result
from chaos.rig import free_port
from conformance.broken_servers import BROKEN, BrokenServer
from conformance.mute import EXIT_CODE, LAST_WORDS, mute_service
from integration.harness import Service, clean_environment
from integration.nursery import nursery

_SOAK = bool(os.environ.get("ANDON_CONFORMANCE"))

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600 if _SOAK else 180)]

_OWN = [1, 2, 3, 4, 5] if _SOAK else [3]
_FOLDER = Path(__file__).parent
_AT_ONCE = 6
_PATIENCE_S = 5.0
"""The time limit for a broken server, because missing messages are waited for."""
_GREAT_PATIENCE_S = 40.0


async def _judged(config: RunnerConfig) -> list[Result]:
    return [result async for result in results_of(config)]


def _failed(results: Sequence[Result]) -> dict[str, str]:
    return {each.name: f"expected {each.expected}; came {each.came}"
            for each in results if each.outcome == "fail"}  # fmt: skip


def _flags(folder: Path, port: int, workers: int) -> list[str]:
    return [
        *("serve", "--port", str(port), "--metrics-port", "0", "--workers", str(workers)),
        *("--run-id", "judged", "--run-dir", str(folder), "--announce"),
    ]


@dataclass(frozen=True)
class Judged:
    """The results of all servers."""

    broken: dict[str, list[Result]]
    """The broken servers' results, by name."""
    own: dict[int, list[Result]]
    """Results of Andon's own server, by the number of workers."""
    uneven: list[Result]
    """Those of Andon's own server that divides batches by speed, and interleaved."""
    in_grains: list[Result]
    """Those of Andon's own server whose line is in grains."""
    killed: tuple[int, str, str]
    """Andon's own server, judged by the command, which kills it: exit code, output, errors."""


class _Court:
    """Judges servers in parallel."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._nursery = asyncio.Lock()

    async def judge_all(self) -> Judged:
        killed = asyncio.create_task(self._judge_killed())
        flags = ("--shares", "balanced-interleaved")
        start = partial(Service, self._folder / "uneven", 5, *flags)
        groups = ("average", "assign", "commit", "void")
        uneven = asyncio.create_task(self._judge(start, groups, _GREAT_PATIENCE_S))
        start = partial(Service, self._folder / "grains", 3)
        grains = self._judge(start, ("grain",), _GREAT_PATIENCE_S, same_bits=True)
        in_grains = asyncio.create_task(grains)
        own = [asyncio.create_task(self._judge_own(workers)) for workers in _OWN]
        broken = await asyncio.gather(*(self._judge_broken(each) for each in BROKEN.values()))
        return Judged(
            dict(zip(BROKEN, broken, strict=True)),
            dict(zip(_OWN, await asyncio.gather(*own), strict=True)),
            await uneven,
            await in_grains,
            await killed,
        )

    async def _judge_own(self, workers: int) -> list[Result]:
        start = partial(Service, self._folder / f"own-{workers}", workers)
        return await self._judge(start, (), _GREAT_PATIENCE_S)

    async def _judge_broken(self, broken: BrokenServer) -> list[Result]:
        only = () if _SOAK else (*broken.caught_by, *broken.passes)
        program = [str(_FOLDER / "broken_servers.py"), broken.name]
        if broken.restarts:
            return await self._judge_restarted(broken, program, only)
        folder = self._folder / broken.name
        start = partial(Service, folder, broken.workers, program=program)
        return await self._judge(start, only, _PATIENCE_S, same_bits=broken.in_grains)

    async def _judge(
        self,
        start: Callable[[], Service],
        only: tuple[str, ...],
        patience_s: float,
        *,
        same_bits: bool = False,
    ) -> list[Result]:
        async with self._places:
            async with self._nursery:
                service = await asyncio.to_thread(start)
            try:
                return await _judged(
                    RunnerConfig(
                        reach=Reach(address=service.address),
                        only=only,
                        patience_s=patience_s,
                        same_bits=same_bits,
                    )
                )
            finally:
                await asyncio.to_thread(service.stop)

    async def _judge_restarted(
        self, broken: BrokenServer, program: list[str], only: tuple[str, ...]
    ) -> list[Result]:
        port = free_port()
        flags = _flags(self._folder / broken.name, port, broken.workers)
        config = RunnerConfig(
            reach=Reach(address=f"127.0.0.1:{port}"),
            only=only,
            start=shlex.join([sys.executable, *program, *flags]),
            patience_s=_GREAT_PATIENCE_S,
        )
        async with self._places:
            return await _judged(config)

    async def _judge_killed(self) -> tuple[int, str, str]:
        port = free_port()
        serve = [sys.executable, "-m", "andon_cli", *_flags(self._folder / "killed", port, 2)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "andon_cli", "conformance", "run", "--format", "json"),
            *("--target", f"127.0.0.1:{port}", "--start", shlex.join(serve), "--only", "journal"),
            *("--patience", str(_GREAT_PATIENCE_S)),
            env=clean_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """Judges all servers in parallel, because each mostly waits."""
    with pytest.MonkeyPatch.context() as patch:
        # Processes that the suite starts find the same modules as this process.
        patch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
        # Here and not in a thread of the court's, with which it would end.
        nursery("service")
        yield asyncio.run(_Court(tmp_path_factory.mktemp("judged")).judge_all())


@pytest.mark.parametrize("name", BROKEN)
def test_broken_server_fails_by_the_checks_that_should_catch_it(judged: Judged, name: str) -> None:
    broken, results = BROKEN[name], judged.broken[name]

    failed = _failed(results)
    if _SOAK:
        # Other checks may fail as a consequence of the defect.
        assert set(broken.caught_by) <= set(failed), failed
    else:
        assert set(failed) == set(broken.caught_by), failed
        assert broken.sign in failed[broken.caught_by[0]]
        assert {each.name for each in results if each.outcome == "pass"} == set(broken.passes)


@pytest.mark.parametrize("workers", _OWN)
def test_andons_own_server_passes_every_check(judged: Judged, workers: int) -> None:
    results = judged.own[workers]

    assert not _failed(results)
    assert [each.name for each in results] == [each.name for each in CHECKS]
    skipped = {each.name for each in results if each.outcome == "skipped"}
    assert skipped == {
        each.name
        for each in CHECKS
        if each.scene in ("restarting", "grains") or each.workers > workers
    }


def test_a_server_that_divides_batches_by_speed_does_so_by_the_rule(judged: Judged) -> None:
    assert {each.outcome for each in judged.uneven} == {"pass"}, _failed(judged.uneven)


def test_andons_own_server_passes_the_checks_of_a_line_in_grains(judged: Judged) -> None:
    assert {each.outcome for each in judged.in_grains} == {"pass"}, _failed(judged.in_grains)


def test_a_server_that_is_killed_keeps_its_records(judged: Judged) -> None:
    code, output, errors = judged.killed

    assert code == 0, output + errors
    report = json.loads(output)
    assert report["conforms"]
    outcomes = {each["name"]: each["outcome"] for each in report["checks"]}
    assert outcomes == dict.fromkeys(
        ("journal.head", "journal.record", "journal.not_forward"), "pass"
    )
    assert (errors, report["server_log"]) == ("", None), "what the server says is apart"


def test_a_server_that_answers_nothing_fails_and_hangs_nobody() -> None:
    async def story() -> list[Result]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((mute_service(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await _judged(
                RunnerConfig(reach=Reach(address=f"127.0.0.1:{port}"), patience_s=0.2)
            )
        finally:
            await server.stop(0)

    results = asyncio.run(asyncio.wait_for(story(), 60))

    failed = _failed(results)
    assert "nothing of the kind within 0.2 s" in failed["join.fresh"]
    assert {each.outcome for each in results if each.name not in failed} == {"skipped"}


def test_a_server_that_ends_is_said_to_have_ended_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    port, log = free_port(), tmp_path / "server.log"
    command = [sys.executable, str(_FOLDER / "mute.py"), str(port)]

    code = asyncio.run(
        judge_server(
            RunnerConfig(
                reach=Reach(address=f"127.0.0.1:{port}"),
                start=shlex.join(command),
                log=log,
                only=("join.fresh",),
                patience_s=1.0,
            )
        )
    )

    report, errors = capsys.readouterr()
    assert code == 1
    assert f"the server's process has ended: exit code {EXIT_CODE}" in report
    assert LAST_WORDS not in report
    assert f"| {LAST_WORDS}" in errors
    assert LAST_WORDS in log.read_text()


def test_a_server_that_does_not_start_is_shown_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "import sys; print('no such flag', file=sys.stderr); sys.exit(3)"
    config = RunnerConfig(
        reach=Reach(address=f"127.0.0.1:{free_port()}"),
        start=shlex.join([sys.executable, "-S", "-c", script]),
    )

    with pytest.raises(CommandError, match="exit code 3"):
        asyncio.run(judge_server(config))

    (log,) = tmp_path.glob("*.log")
    said = capsys.readouterr().err
    assert "| no such flag" in said
    assert str(log) in said, "it is kept, and its name is told"


def test_a_line_that_somebody_joined_is_not_judged(tmp_path: Path) -> None:
    with Service(tmp_path / "run", 2) as service:
        asyncio.run(
            _judged(RunnerConfig(reach=Reach(address=service.address), only=("commit.record",)))
        )

        with pytest.raises(UsageError, match="not a new one"):
            asyncio.run(_judged(RunnerConfig(reach=Reach(address=service.address))))


def test_nobody_at_the_target_is_told_apart_from_a_failure() -> None:
    config = RunnerConfig(reach=Reach(address=f"127.0.0.1:{free_port()}"), patience_s=0.5)

    with pytest.raises(LineUnreachable, match="no process listens there"):
        asyncio.run(_judged(config))
