"""The board of a real service with real workers: seen, answered, and refused to strangers."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from andon.v1 import coordinator_pb2 as pb
from integration.harness import Service, start_line
from unit.andon.certificates import certify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STEPS, POISONED = 6, 3
SPEC: dict[str, Any] = {
    "samples": 40, "batch": 8, "steps": STEPS, "survive": True,
    "poison": {
        "step": POISONED, "slot": 1, "parameter": "blocks.1.up.weight", "element": [3, 2],
        "value": "nan",
    },
}  # fmt: skip
RUN, OPERATORS = "the-token-of-the-run", "the-token-of-operators"
_PATIENCE_S = 60
_OURS = {"Content-Type": "application/json", "X-Andon-Board": "1"}


@dataclass
class Board:
    """A browser without a window."""

    url: str
    context: ssl.SSLContext | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str | None
    ) -> http.client.HTTPResponse:
        """Asks for something; a header that is None is left out."""
        where = urlsplit(self.url)
        assert where.hostname is not None
        connection = (
            http.client.HTTPConnection(where.hostname, where.port, timeout=_PATIENCE_S)
            if self.context is None
            else http.client.HTTPSConnection(
                where.hostname, where.port, timeout=_PATIENCE_S, context=self.context
            )
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {**self.headers, **(_OURS if method == "POST" else {}), **named}
        connection.request(
            method,
            path,
            None if body is None else json.dumps(body),
            {name: value for name, value in given.items() if value is not None},
        )
        return connection.getresponse()

    def read(self, path: str) -> Any:
        """What the API answers."""
        answer = self.ask(f"/board/api/{path}")
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())

    def status_of(self, path: str, method: str = "GET", body: Any = None, **more: Any) -> int:
        """The status of an answer."""
        answer = self.ask(path, method, body, **more)
        answer.read()
        return answer.status

    def live(self) -> Iterator[tuple[str, Any]]:
        """The messages of a stream, until it ends."""
        event = ""
        for raw in self.ask("/board/api/live"):
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                yield event, json.loads(value)


@dataclass
class Story:
    """A run that stopped for a NaN and was resumed from its board."""

    halted: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    answered: tuple[int, Any] = (0, None)
    again: tuple[int, Any] = (0, None)
    points: list[list[Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, value: Any) -> None:
        """Keeps what happened."""
        if kind == "points":
            self.points += value["steps"]
        else:
            self.events.append(value)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    told = Story()
    with start_line(tmp_path_factory.mktemp("board"), SPEC, 2) as (service, workers):
        board = Board(service.board_url)
        messages = board.live()
        while told.halted.get("state") != "HALTED":
            kind, value = next(messages)
            if kind == "state":
                told.halted = value
            else:
                told.take(kind, value)
        answer = {"halt_id": told.halted["halt"]["id"], "answer": "retry", "worker": None}
        told.refused = {
            "without our header": board.status_of(
                "/board/api/answer", "POST", answer, X_Andon_Board=None
            ),
            "of another page": board.status_of(
                "/board/api/answer", "POST", answer, Origin="http://evil.example"
            ),
            "under another name": board.status_of(
                "/board/api/answer", "POST", answer, Host="evil.example"
            ),
            "to another halt": board.status_of(
                "/board/api/answer", "POST", {**answer, "halt_id": "12345"}
            ),
        }
        for outcome in ("answered", "again"):
            reply = board.ask("/board/api/answer", "POST", answer)
            setattr(told, outcome, (reply.status, json.loads(reply.read())))
        for worker in workers:
            assert worker.wait() == 0, worker.output
        service.await_status(lambda line: line.state == pb.LINE_STATE_COMPLETE)
        told.runs = board.read("runs")
        told.run = board.read(f"runs/{service.run_id}")
        told.curves = board.read(f"runs/{service.run_id}/curves")
        # The stream is still open. The service ends it after the last of it, and does not wait.
        service.stop()
        for kind, value in messages:
            if kind == "state":
                told.last = value
            else:
                told.take(kind, value)
    return told


def test_a_halt_is_seen_with_its_evidence_and_its_answers(story: Story) -> None:
    halt = story.halted["halt"]

    assert (halt["reason"], halt["step"], halt["worker"]) == ("non_finite_gradient", POISONED, 1)
    assert (halt["parameter"], halt["element"]) == ("blocks.1.up.weight", [3, 2])
    assert halt["sentence"].startswith(f"HALTED at step {POISONED} ")
    assert [each["answer"] for each in halt["answers"]] == ["retry", "skip", "drop"]
    assert (story.halted["may_operate"], story.halted["needs_login"]) == (True, False)
    assert [each["worker"] for each in story.halted["workers"]] == [0, 1]


def test_answers_of_others_are_refused_and_the_line_stays_halted(story: Story) -> None:
    assert story.refused == {
        "without our header": 403,
        "of another page": 403,
        "under another name": 403,
        "to another halt": 409,
    }


def test_the_answer_resumes_the_line_once(story: Story) -> None:
    status, said = story.again

    assert story.answered == (200, {"ok": True})
    assert status == 409
    assert "halt" in said["error"]
    [halt] = story.run["halts"]
    assert (halt["answer"], halt["operator"]) == ("retry", "board@127.0.0.1")


def test_the_stream_has_every_step_once_and_ends_with_the_run(story: Story) -> None:
    assert [point[0] for point in story.points] == list(range(1, STEPS + 1))
    assert (story.last["state"], story.last["step"]) == ("COMPLETE", STEPS)


def test_what_happened_is_told_live_as_it_is_in_the_history(story: Story) -> None:
    kinds = [each["kind"] for each in story.events]

    later = [each for each in story.run["events"] if each["id"] >= story.events[0]["id"]]
    assert story.events[: len(later)] == later
    assert [kind for kind in kinds if kind in ("halted", "answered", "complete")] == [
        "halted", "answered", "complete",
    ]  # fmt: skip


def test_history_and_curves_are_those_of_the_stream(story: Story) -> None:
    [run] = story.runs
    steps = story.curves["steps"]

    assert (run["state"], run["steps"], run["halts"], run["current"]) == (
        "complete",
        STEPS,
        1,
        True,
    )
    assert run == story.run["run"]
    assert steps["step"] == [point[0] for point in story.points]
    assert steps["loss"] == [point[1] for point in story.points]


# ------------------------------------------------------------------- tokens, over TLS


def test_with_tokens_and_certificates_strangers_see_nothing_and_operators_halt(
    tmp_path: Path,
) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "host", "127.0.0.1")
    files = []
    for name, token in (("token", RUN), ("operator-token", OPERATORS)):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
        files += [f"--{name}-file", str(tmp_path / name)]
    with Service(tmp_path / "run", 1, "--tls", str(certs), *files) as service:
        context = ssl.create_default_context(cafile=str(certs / "ca.crt"))
        board = Board(service.board_url.replace("http://", "https://"), context)

        assert board.status_of("/board/api/state") == 401
        assert board.status_of("/board/api/live") == 401
        assert board.status_of("/board/api/login", "POST", {"token": "x" * 20}) == 401
        looking = board.ask("/board/api/login", "POST", {"token": RUN})
        assert looking.status == 200
        board.headers["Cookie"] = looking.headers["Set-Cookie"].partition(";")[0]
        assert "; Secure" in looking.headers["Set-Cookie"]
        assert board.read("state")["may_operate"] is False
        assert board.status_of("/board/api/halt", "POST", {"reason": "odd"}) == 403
        kind, state = next(board.live())
        assert (kind, state["state"]) == ("state", "FORMING")

        operating = board.ask("/board/api/login", "POST", {"token": OPERATORS})
        board.headers["Cookie"] = operating.headers["Set-Cookie"].partition(";")[0]
        assert board.status_of("/board/api/halt", "POST", {"reason": "odd"}) == 200
        assert board.status_of("/board/api/drain", "POST", {}) == 200

        run = board.read(f"runs/{service.run_id}")
        assert run["halts"][0]["message"] == "board@127.0.0.1 pulled the cord: odd"
        # Prometheus goes on without a token, encrypted or not.
        assert Board(service.board_url).status_of("/metrics") == 200
        assert Board(board.url, context).status_of("/metrics") == 200
        assert service.refusals()["server", "token"] > 0
