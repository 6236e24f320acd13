"""Tokens: who may join, view and stop a line; nobody can contribute in another worker's rank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from andon.host.run_token import bearer_metadata
from andon.protocol import tokens
from andon.protocol.messages import AveragedBlock, BlockFault, BlockFaultKind, OpenRound
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from integration.fixtures.console import andon, finish, run_warm, start_warm
from integration.harness import Service, Worker, on_line, start_worker
from integration.newcomer import refusal_of
from integration.reducer_bench import RUN as REDUCED_RUN
from integration.reducer_bench import SECRET as REDUCER_SECRET
from integration.reducer_bench import Reducer, Stream, chunks_of
from integration.served import config_in, refused, run, serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN, OPERATORS = b"the-token-of-the-run", b"the-token-of-operators"
VIEWERS = b"the-token-of-viewers"
LOOKING = ("GetStatus", "WatchStatus")
OPERATING = ("PullCord", "ClearHalt", "Drain")
KEY = Key(1, 1)
NUMBERS = np.ones(10, np.float32)


def asked(folder: Path, shown: bytes, **line_tokens: bytes) -> dict[str, str]:
    """The status of each call, by name; empty if it was accepted."""
    ends: dict[str, str] = {}

    async def story() -> None:
        config = config_in(folder, **line_tokens)
        async with serving(config) as served:
            for name in (*LOOKING, *OPERATING):
                request = getattr(pb, f"{name}Request")(run_id="not this run")
                call = getattr(served.stub, name)(request, metadata=bearer_metadata(shown))
                answer = call.read() if name == "WatchStatus" else call
                code, info = await refused(answer)
                # A caller with access gets the error that the run is another one.
                known = (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "WRONG_RUN")
                ends[name] = "" if known else f"{code.name} {info.reason}"

    run(story())
    return ends


BOTH = {"token": RUN, "operator_token": OPERATORS}
REFUSED, NOT_ONES_OWN = "UNAUTHENTICATED TOKEN", "PERMISSION_DENIED OPERATOR_TOKEN"


@pytest.mark.parametrize(
    ("shown", "line_tokens", "looking", "operating"),
    [
        (b"", BOTH, REFUSED, REFUSED),
        (b"a-token-of-another-run", BOTH, REFUSED, REFUSED),
        (RUN, BOTH, "", NOT_ONES_OWN),
        (OPERATORS, BOTH, "", ""),
        (RUN, {"token": RUN}, "", ""),
        (b"", {}, "", ""),
    ],
    ids=["none", "another", "the run's", "operators'", "the run's alone", "none is asked for"],
)
def test_a_token_opens_what_it_is_for_and_without_one_a_caller_learns_nothing(
    tmp_path: Path, shown: bytes, line_tokens: dict[str, bytes], looking: str, operating: str
) -> None:
    ends = asked(tmp_path, shown, **line_tokens)

    assert ends == {**dict.fromkeys(LOOKING, looking), **dict.fromkeys(OPERATING, operating)}


# ------------------------------------------------------------------ with real processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name, token in (("run-token", RUN), ("operators", OPERATORS), ("wrong", b"w" * 20)):
        (folder / name).write_bytes(token)
        (folder / name).chmod(0o600)
    (folder / "viewers").write_bytes(VIEWERS)
    (folder / "withdrawn").write_text("gamma\n")
    for name in ("beta", "gamma"):
        code, made, errors = andon(folder, "token", name, "--token-file", f"{folder}/run-token")
        assert code == 0, errors
        (folder / f"{name}-token").write_text(made)
    return folder


class Line:
    """A line that requires tokens, with two workers that wait before their last step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.go = folder, folder / "go"
        names = ("token", "run-token"), ("operator-token", "operators"), ("viewer-token", "viewers")
        files = [f"--{flag}-file={folder}/{name}" for flag, name in names]
        withdrawn = f"--withdrawn-file={folder}/withdrawn"
        self.service = Service(folder / "run", 2, *files, withdrawn, "--may-stop", "operators")
        pauses = [{"slot": 0, "step": 20, "until": str(self.go)}]
        self.spec: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 20, "pauses": pauses}
        self.workers = [self.worker(0, "run-token"), self.worker(1, "beta-token")]
        with grpc.insecure_channel(self.service.address) as channel:
            watch = CoordinatorStub(channel).WatchStatus(
                pb.WatchStatusRequest(), timeout=60, metadata=bearer_metadata(RUN)
            )
            assert any(update.status.step >= 1 for update in watch)
            watch.cancel()

    def worker(self, slot: int, token: str, name: str = "") -> Worker:
        """A worker that sends the token of a file; an empty path: no token."""
        folder = self.folder / (name or f"worker-{slot}")
        folder.mkdir()
        shown = {"ANDON_TOKEN_FILE": str(self.folder / token)} if token else {}
        variables = {**on_line(self.service, slot, 2), "ANDON_ON_HALT": "wait", **shown}
        return start_worker(folder, self.spec, slot=slot, **variables)

    def ask(self, verb: str, token: str = "", *flags: str) -> tuple[int, str, str]:
        given = ("--token-file", str(self.folder / token)) if token else ()
        return andon(self.folder, verb, "--address", self.service.address, *given, *flags)


@pytest.fixture(scope="module")
def line(folder: Path) -> Iterator[Line]:
    line = Line(folder)
    try:
        yield line
    finally:
        for worker in line.workers:
            worker.kill()
        line.service.stop()


def test_a_worker_without_the_runs_token_is_told_and_the_others_go_on(line: Line) -> None:
    environment, before = on_line(line.service, 1, 2), line.service.refusals()
    stranger = line.worker(1, "wrong", "stranger")
    code = stranger.wait()
    withdrawn = line.worker(1, "gamma-token", "withdrawn-worker")
    assert withdrawn.wait() == 4
    assert "the token of gamma was withdrawn" in withdrawn.output
    bare = refusal_of(line.spec, 1, environment)
    status = json.loads(line.ask("status", "run-token", "--format", "json")[1])

    assert (code, stranger.seen["reason"], stranger.seen["component"]) == (4, "token", "token")
    assert "asks for the run's token, and the worker shows another" in stranger.output
    assert bare.reason == "token"
    assert "asks for the run's token, and the worker shows none: give it" in str(bare)
    assert "ANDON_TOKEN_FILE" in str(bare)
    assert (status["state"], status["live"]) == ("RUNNING", 2)
    after = line.service.refusals()
    counted = {name: after[name] - count for name, count in before.items()}
    assert {name: count for name, count in counted.items() if count} == {
        ("coordinator", "token"): 3
    }


def test_the_console_shows_its_token_and_is_told_which_is_missing(line: Line) -> None:
    nobody, wrong = line.ask("status"), line.ask("status", "wrong")
    looker, operator = line.ask("halt", "run-token"), str(line.folder / "operators")
    halted = line.ask("halt", "", "--operator-token-file", operator)
    resumed = line.ask("resume", "run-token", "--operator-token-file", operator)
    viewers = ("--viewer-token-file", str(line.folder / "viewers"))
    viewer, meddler = line.ask("status", "", *viewers), line.ask("halt", "viewers")
    health = line.ask("health")

    assert (viewer[0], meddler[0]) == (0, 4), (viewer, meddler)
    assert "operators have a token" in meddler[2]
    assert (nobody[0], wrong[0], looker[0]) == (4, 4, 4)
    assert "the call shows none: pass --token-file" in nobody[2]
    assert "the call shows another: pass --token-file" in wrong[2]
    assert "operators have a token, and the call does not show it" in looker[2]
    assert (halted[0], resumed[0]) == (0, 0), (halted, resumed)
    assert (health[0], health[1].split()[0]) == (0, "SERVING")


def test_tokens_are_in_no_log_no_output_and_no_command_line(line: Line) -> None:
    pids = [line.service.process.pid, *(worker.process.pid for worker in line.workers)]
    said = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    line.go.touch()
    codes = [worker.wait() for worker in line.workers]
    line.service.stop()
    own = {"run-token", "operators"}
    files = [path for path in line.folder.rglob("*") if path.is_file() and path.name not in own]
    said += [path.read_bytes() for path in files]

    assert codes == [0, 0], [worker.output for worker in line.workers]
    assert len({worker.seen["digest"] for worker in line.workers}) == 1
    (log,) = (path for path in files if path.name == "service.log")
    assert re.search(r"worker_joined worker=1 join_status=\w+ token=beta", log.read_text())
    assert not [text for text in said if RUN in text or OPERATORS in text]


@pytest.mark.parametrize("length", [0, 15])
def test_a_service_refuses_a_token_that_could_be_guessed(tmp_path: Path, length: int) -> None:
    (tmp_path / "token").write_text("t" * length)

    code, _, errors = andon(
        tmp_path, *("serve", "--port", "0", "--metrics-port", "0", "--token-file", "token")
    )

    assert code == 2
    assert f"--token-file token holds {length} bytes, and must hold 16 or more" in errors


def test_a_run_hands_its_token_to_its_service_and_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, grpc\n"
        "from andon.v1 import coordinator_pb2 as pb\n"
        "from andon.v1.coordinator_pb2_grpc import CoordinatorStub\n"
        "stub = CoordinatorStub(grpc.insecure_channel(os.environ['ANDON_ADDRESS']))\n"
        "try:\n    stub.GetStatus(pb.GetStatusRequest(), timeout=10)\n"
        "except grpc.RpcError as error:\n    print(error.code().name)\n"
        "shown = (('authorization', 'Bearer ' + os.environ['ANDON_TOKEN']),)\n"
        "stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=shown)\n"
        "print('let in')\n"
    )

    _, output, errors = finish(
        start_warm(tmp_path, "run", str(script), room="service", ANDON_TOKEN=RUN.decode())
    )
    (log,) = (tmp_path / "runs").glob("*/service.log")

    assert "[worker 0] UNAUTHENTICATED" in output + errors
    assert "[worker 0] let in" in output + errors
    assert RUN.decode() not in output + errors + log.read_text()


def test_a_script_that_may_not_end_the_run_trains_on_and_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from andon_trainer import Line\n"
        "line, model = Line(), torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=4)\n"
        "model, optimizer, loader = line.prepare(model, optimizer, loader)\n"
        "for _ in line.epochs(1):\n"
        "    for (x,) in loader:\n"
        "        line.stop('enough')\n"
        "        optimizer.zero_grad()\n"
        "        line.backward(model(x).mean())\n"
        "        optimizer.step()\n"
        "print('made', line.step, 'steps:', line.stopped or 'all')\n"
    )

    code, output, errors = run_warm(tmp_path, "run", "--may-stop", "operators", str(script))
    (log,) = (tmp_path / "runs").glob("*/service.log")

    assert (code, "made 3 steps: all" in output) == (0, True), output + errors
    assert (output + errors).count("the script wanted to end the run (enough), and the line") == 1
    assert log.read_text().count("script wants to end the run (enough)") == 1


# ------------------------------------------------------------------ at a reducer


@pytest.fixture
def reducer() -> Iterator[Reducer]:
    with Reducer() as running:
        yield running


@pytest.mark.parametrize("first", ["the right one", "the wrong one"])
def test_nobody_contributes_in_anothers_rank(reducer: Reducer, first: str) -> None:
    """Worker 2, with a token of its own, claims rank 1, which is worker 1's."""
    with (
        Stream(reducer.port, 0) as honest,
        Stream(reducer.port, 1) as right,
        Stream(reducer.port, 2) as wrong,
    ):
        claims = [right, wrong] if first == "the right one" else [wrong, right]
        for place, stream in enumerate(claims):
            stream.send(*chunks_of(1, NUMBERS, key=KEY, world_size=3))
            if not place:
                honest.send(*chunks_of(0, NUMBERS, key=KEY, world_size=3))
        answers = [stream.read() for stream in (honest, right, wrong)]

    for answer in answers:
        assert isinstance(answer, BlockFault)
        assert answer.kind is BlockFaultKind.INCONSISTENT
        assert "worker 1" in answer.message
        assert "worker 2" in answer.message
    assert not [answer for answer in answers if isinstance(answer, AveragedBlock)]


def test_a_dead_predecessors_token_opens_nothing_once_the_slot_has_another_worker(
    reducer: Reducer,
) -> None:
    def opening(number: int) -> OpenRound:
        token = tokens.session_token(REDUCER_SECRET, REDUCED_RUN, 1, (5, number))
        return OpenRound(REDUCED_RUN, 1, token)

    with (
        Stream(reducer.port, 1, opened=False) as dead,
        Stream(reducer.port, 1, opened=False) as successor,
        Stream(reducer.port, 1, opened=False) as replayed,
    ):
        for stream, number in ((dead, 3), (successor, 4)):
            stream.send(opening(number))
            stream.read()
        replayed.send(opening(3))
        with pytest.raises(grpc.RpcError) as caught:
            replayed.read()

    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "joined again since this session token was made" in error.details()
